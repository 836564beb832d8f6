"""The `reads` of a pack: which answer becomes which number of which category."""

from typing import Any

from spinf_serve.packs.model import ANY, KINDS, OPTION, PAIR, SET, Query, Read
from spinf_serve.packs.problems import MAX_NUMBER, Problems, fields_of, is_number, unknown_keys
from spinf_serve.protocol.document import Fields, Place
from spinf_serve.protocol.queries import MAX_ID_CHARS

_COMMON = ("id", "query", "F", "kind", "category", "mean", "sd", "view")
_OWN = {PAIR: ("sign",), OPTION: ("option", "mu"), ANY: ("mu",), SET: ("mu", "unsafe")}
_ALL_OWN = tuple(dict.fromkeys(name for names in _OWN.values() for name in names))
_FITTED = ("mean", "sd")


def parse_reads(
    root: Fields, queries: tuple[Query, ...], categories: set[str], problems: Problems, *, draft: bool
) -> tuple[tuple[Read, ...], bool]:
    """The reads, and whether any lacks what is fitted (only `draft` allows that)."""
    entries = root.items("reads", required=True) or []
    place, reads, ids, unfitted = root.place("reads"), list[Read](), set[str](), False
    if "reads" in root and not entries:
        problems.at(place, "must hold at least one read")
    by_id = {query.id: query for query in queries}
    for i, entry in enumerate(entries):
        fields = fields_of(entry, place.item(i), problems)
        if fields is None:
            continue
        read, fitted = _read(fields, by_id, categories, problems, draft)
        unfitted |= not fitted
        if read.id in ids:
            problems.at(fields.place("id"), "repeats the id of another read")
        ids.add(read.id or f"\0{i}")
        reads.append(read)
    return tuple(reads), unfitted


def _read(
    fields: Fields, queries: dict[str, Query], categories: set[str], problems: Problems, draft: bool
) -> tuple[Read, bool]:
    kind = fields.string("kind", required=True)
    if kind is not None and kind not in KINDS:
        fields.fault("kind", f"must be one of {', '.join(KINDS)}")
    own = _OWN.get(kind or "", _ALL_OWN)
    for place, message in unknown_keys(fields, (*_COMMON, *own)):
        misplaced = place.path[-1] in _ALL_OWN
        problems.at(place, f"does not go with kind {kind}" if misplaced else message)
    query = _query_of(fields, queries)
    options = len(query.options) if query is not None else None
    category = fields.string("category", required=True)
    if category is not None and category not in categories:
        fields.fault("category", "no such category")
    mean, sd = _spread(fields, draft)
    read = Read(
        id=fields.string("id", min_chars=1, max_chars=MAX_ID_CHARS, required=True) or "",
        query=query.id if query is not None else "",
        F=_combination(fields, query),
        kind=kind or PAIR,
        category=category or "",
        mean=mean or 0.0,
        sd=sd or 1.0,
        view=fields.string("view", min_chars=1, max_chars=MAX_ID_CHARS),
        sign=_sign(fields),
        option=_option(fields, options) if kind == OPTION else 0,
        mu=_mu(fields, kind or PAIR, options, draft),
        unsafe=_unsafe(fields, options, problems) if kind == SET else (),
    )
    if kind == PAIR and options is not None and options != 2:
        fields.fault("kind", f"pair reads a query with two options, this one has {options}")
    return read, all(name in fields for name in _FITTED) and (kind == PAIR or "mu" in fields)


def _query_of(fields: Fields, queries: dict[str, Query]) -> Query | None:
    name = fields.string("query", required=True)
    query = queries.get(name) if name is not None else None
    if name is not None and query is None:
        fields.fault("query", "no such query")
    return query


def _combination(fields: Fields, query: Query | None) -> str | None:
    value = fields.string("F")
    if query is None or ("F" in fields and value is None):
        return value
    if value is None and query.values != (None,):
        fields.fault("F", "missing: it says which combination of the query is read")
    elif value is not None and query.values == (None,):
        fields.fault("F", "the query has no placeholder")
    elif value not in query.values:
        fields.fault("F", "no such combination of the query")
    return value


def _spread(fields: Fields, draft: bool) -> tuple[float | None, float | None]:
    mean, sd = (_number(fields, name, required=not draft) for name in _FITTED)
    if sd is not None and sd < 1 / MAX_NUMBER:
        fields.fault("sd", "must be greater than 0" if sd <= 0 else f"must be at least {1 / MAX_NUMBER:g}")
        sd = None
    return mean, sd


def _number(fields: Fields, name: str, *, required: bool) -> float | None:
    if name not in fields:
        if required:
            fields.fault(name, "missing")
        return None
    value = fields.value[name]
    if not is_number(value):
        fields.fault(name, "must be a number")
        return None
    return float(value)


def _sign(fields: Fields) -> int:
    sign = fields.value.get("sign", 1)
    if not is_number(sign) or sign not in (1, -1):
        fields.fault("sign", "must be 1 or -1")
        return 1
    return int(sign)


def _index(value: Any, options: int | None) -> bool:
    return (
        isinstance(value, int) and not isinstance(value, bool) and value >= 0 and (options is None or value < options)
    )


def _option(fields: Fields, options: int | None) -> int:
    if "option" not in fields:
        fields.fault("option", "missing: the index of the option that is read")
        return 0
    if not _index(fields.value["option"], options):
        fields.fault("option", "must be the index of an option, counted from 0")
        return 0
    return int(fields.value["option"])


def _mu(fields: Fields, kind: str, options: int | None, draft: bool) -> tuple[float, ...]:
    """One value per option. `option` gives one number, which applies to the option that is read."""
    if kind not in KINDS or kind == PAIR:
        return ()
    if "mu" not in fields:
        if not draft:
            fields.fault("mu", "missing")
        return (0.0,) * (options or 0)
    mu = fields.value["mu"]
    if kind == OPTION:
        value = _number(fields, "mu", required=True)
        return (value or 0.0,) * (options or 0)
    if not isinstance(mu, list) or not all(map(is_number, mu)):
        fields.fault("mu", f"must be a list of numbers, one for each option (kind {kind})")
        return (0.0,) * (options or 0)
    if options is not None and len(mu) != options:
        fields.fault("mu", f"holds {len(mu)} numbers, the query has {options} options")
        return (0.0,) * options
    return tuple(map(float, mu))


def _unsafe(fields: Fields, options: int | None, problems: Problems) -> tuple[int, ...]:
    entries = fields.items("unsafe", required=True)
    if entries is None:
        return ()
    place, indices = fields.place("unsafe"), dict[int, None]()
    for i, entry in enumerate(entries):
        _add_index(entry, options, place.item(i), indices, problems)
    if not entries or (options is not None and len(indices) >= options):
        problems.at(place, "must hold some of the options, and not all")
    return tuple(indices)


def _add_index(entry: Any, options: int | None, place: Place, indices: dict[int, None], problems: Problems) -> None:
    if not _index(entry, options):
        problems.at(place, "must be the index of an option, counted from 0")
    elif entry in indices:
        problems.at(place, "repeats an index")
    else:
        indices[entry] = None
