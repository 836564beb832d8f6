"""Queries of a request: shape, template, options and combinations, without a tokenizer."""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from spinf_serve.protocol.document import Faults, Fields, Place
from spinf_serve.templates import (
    MAX_COMBINATIONS,
    MAX_VALUE_CHARS,
    SCORED,
    TEXT,
    Combinations,
    Template,
    TemplateError,
    parse_template,
    product_size,
)

MAX_ID_CHARS = 128

_EXTRACTION_ONLY = ("max_tokens", "top_k", "calibration", "generate")
_QUERY_FIELDS = frozenset(
    {"id", "template", "options", "combinations", "values", "empty_floor", "group", *_EXTRACTION_ONLY}
)
_GENERATE_FIELDS = frozenset({"temperature", "top_p", "top_k", "seed", "n"})

_MAX_SEARCHED_TOKENS, _MAX_GENERATED_TOKENS = 64, 100
_MAX_ANSWERS, _MAX_CANDIDATES, _MAX_SEQUENCES = 20, 100, 6
_MAX_CALIBRATION = 1e6
_MAX_TEMPERATURE = 2
_SEED_MIN, _SEED_MAX = -(2**63), 2**64 - 1
_SMALLEST_POSITIVE = 5e-324


@dataclass(frozen=True, eq=False, slots=True)
class Query:
    """A scored query. `options` and `combinations` end before the first one that is at fault."""

    id: str
    template: Template
    options: tuple[str, ...]
    combinations: Combinations
    empty_floor: bool
    group: str | None
    place: Place
    template_place: Place
    options_place: Place
    of_pack: bool = False  # its author's templates may be as long as they are


@dataclass(frozen=True, slots=True)
class QueryRules:
    """What holds for every query of the call."""

    empty_floor: bool
    case_insensitive: bool
    max_options: int
    taken: frozenset[str] = frozenset()  # ids of the packs' queries
    reserved: frozenset[str] = frozenset()  # groups of the packs


@dataclass(frozen=True, slots=True)
class QueryList:
    """A list of queries. `queries` holds those that can be compiled, `ids` every id that was sent, `count` all entries.

    `known` is False where what was sent is no list, so that nothing can be said about what it lacks.
    """

    queries: tuple[Query, ...] = ()
    ids: frozenset[str] = frozenset()
    count: int = 0
    known: bool = True


def read_queries(fields: Fields, rules: QueryRules, taken: Set[str] = frozenset()) -> QueryList:
    """The field `queries` of `scoring` or of an input; `taken` are ids that its queries may not use."""
    entries = fields.items("queries")
    if entries is None:
        return QueryList(known="queries" not in fields)
    place, queries, ids = fields.place("queries"), [], set[str]()
    for i, entry in enumerate(entries):
        if not isinstance(entry, dict):
            fields.faults.add(place.item(i), "invalid_field", "must be an object")
            continue
        query_fields = Fields(entry, place.item(i), fields.faults)
        query_id = query_fields.string("id", max_chars=MAX_ID_CHARS, required=True)
        if query_id is not None:
            if query_id in rules.taken:
                query_fields.fault("id", "a pack of this call has a query with this id", "duplicate_id")
            elif query_id in ids or query_id in taken:
                query_fields.fault("id", "another query of this input has this id", "duplicate_id")
            ids.add(query_id)
        query = _query(query_fields, query_id or "", rules)
        if query is not None:
            queries.append(query)
    return QueryList(tuple(queries), frozenset(ids), len(entries))


def _query(fields: Fields, query_id: str, rules: QueryRules) -> Query | None:
    fields.refuse_unknown(_QUERY_FIELDS)
    template = _template(fields)
    empty_floor = fields.boolean("empty_floor", rules.empty_floor)
    group = fields.string("group", max_chars=MAX_ID_CHARS)
    if group in rules.reserved:
        fields.fault("group", "this group belongs to a pack of this call", "reserved_group")
    options = _options(fields, rules)
    combinations = _combinations(fields, template)
    if template is None:
        return None
    if template.slot != SCORED:
        _extraction(fields, template)
        return None
    for name in _EXTRACTION_ONLY:
        if name in fields:
            fields.fault(name, "goes with an extraction slot only")
    if "options" not in fields:
        fields.fault("options", "a {?} slot needs options", "missing_value")
    return Query(
        id=query_id,
        template=template,
        options=options,
        combinations=combinations,
        empty_floor=empty_floor,
        group=group,
        place=fields.at,
        template_place=fields.place("template"),
        options_place=fields.place("options"),
    )


def _template(fields: Fields) -> Template | None:
    text = fields.string("template", required=True)
    if text is None:
        return None
    try:
        return parse_template(text)
    except TemplateError as error:
        fields.fault("template", str(error), "invalid_template")
        return None


def _options(fields: Fields, rules: QueryRules) -> tuple[str, ...]:
    """The options before the first faulty one."""
    options = fields.items("options")
    if options is None:
        return ()
    if not 1 <= len(options) <= rules.max_options:
        fields.fault("options", f"must hold 1 to {rules.max_options} options", "too_many_options")
        return ()
    place, seen = fields.place("options").item, dict[str, int]()
    for i, option in enumerate(options):
        if not isinstance(option, str) or not option:
            fields.faults.add(place(i), "invalid_field", "an option must be a string that is not empty")
            return tuple(options[:i])
        key = option.strip().casefold() if rules.case_insensitive else option
        if seen.setdefault(key, i) != i:
            what = ", case and outer spaces aside" if rules.case_insensitive else ""
            fields.faults.add(place(i), "duplicate_option", f"repeats option {seen[key]}{what}")
            return tuple(options[:i])
    return tuple(options)


def _combinations(fields: Fields, template: Template | None) -> Combinations:
    """The combinations before the first faulty one; one empty combination for a template without placeholders."""
    names = template.placeholders if template is not None else None
    sent = fields.value.get("combinations")
    if "values" in fields and sent != "all":
        fields.fault("values", 'goes with "combinations": "all" only')
    if sent == "all":
        return _product(fields, names)
    if isinstance(sent, str):
        fields.fault("combinations", 'must be a list, or "all"')
        return Combinations()
    rows = fields.items("combinations")
    if not rows:
        if names:
            fields.fault("combinations", "the template has placeholders, so it needs combinations", "missing_value")
        return Combinations(rows=[{}] if not names else [])
    if len(rows) > MAX_COMBINATIONS:
        fields.fault("combinations", f"must hold at most {MAX_COMBINATIONS} combinations", "too_many_combinations")
        return Combinations()
    place = fields.place("combinations")
    for i, row in enumerate(rows):
        if not _row_is_sound(row, place.item(i), fields.faults, names):
            return Combinations(rows=rows[:i])
    return Combinations(rows=rows)


def _row_is_sound(row: Any, place: Place, faults: Faults, names: tuple[str, ...] | None) -> bool:
    if not isinstance(row, dict):
        faults.add(place, "invalid_field", "must be an object of placeholder values")
        return False
    fields = Fields(row, place, faults)
    sound = _names_match(fields, names)
    for name in row:
        sound &= fields.string(name, max_chars=MAX_VALUE_CHARS) is not None
    return sound


def _names_match(fields: Fields, names: tuple[str, ...] | None) -> bool:
    """Exactly the template's placeholders; anything goes while the template itself is at fault."""
    if names is None:
        return True
    sound = True
    for name in names:
        if name not in fields:
            sound = False
            fields.fault(name, "a value for this placeholder is missing", "missing_value")
    for name in fields.value:
        if name not in names:
            sound = False
            fields.fault(name, "the template has no such placeholder", "unknown_placeholder")
    return sound


def _product(fields: Fields, names: tuple[str, ...] | None) -> Combinations:
    values = fields.object("values")
    if values is None:
        if names and "values" not in fields:
            fields.fault("values", '"combinations": "all" needs values', "missing_value")
        return Combinations(rows=[{}] if names == () else [])
    sound = _names_match(values, names)
    axes: dict[str, list[str]] = {}
    for name in values.value:
        axis = values.items(name)
        sound &= axis is not None
        axes[name] = axis or []
        if axis == []:
            sound = False
            values.fault(name, "must hold at least one value", "missing_value")
        for i, value in enumerate(axes[name]):
            if not isinstance(value, str) or len(value) > MAX_VALUE_CHARS:
                sound = False
                message = f"must be a string of at most {MAX_VALUE_CHARS} characters"
                fields.faults.add(values.place(name).item(i), "invalid_field", message)
                break
    if sound and product_size(axes) > MAX_COMBINATIONS:
        message = f"the values make more than {MAX_COMBINATIONS} combinations"
        fields.fault("combinations", message, "too_many_combinations")
        return Combinations()
    return Combinations(axes=_in_order(axes, names)) if sound and names is not None else Combinations()


def _in_order(axes: Mapping[str, list[str]], names: tuple[str, ...]) -> dict[str, list[str]]:
    return {name: axes[name] for name in names}


def _extraction(fields: Fields, template: Template) -> None:
    """Checks the fields of an extraction slot, then refuses it: this server has no extraction."""
    if "options" in fields:
        fields.fault("options", "an extraction slot takes no options")
    generated = "generate" in fields
    fields.integer("max_tokens", 1, _MAX_GENERATED_TOKENS if generated else _MAX_SEARCHED_TOKENS)
    fields.integer("top_k", 1, _MAX_ANSWERS)
    calibration = fields.object("calibration")
    if calibration is not None:
        calibration.refuse_unknown(("a", "b"))
        for name in ("a", "b"):
            calibration.number(name, -_MAX_CALIBRATION, _MAX_CALIBRATION, required=True)
    if generated:
        _generate(fields, template)
    message = "this server does not answer extraction slots"
    fields.faults.add(_after(fields, "template"), "extraction_disabled", message)


def _after(fields: Fields, name: str) -> Place:
    """The path of a field, ranked after everything else in its object."""
    return Place(fields.place(name).path, fields.at.end().order)


def _generate(fields: Fields, template: Template) -> None:
    if template.slot != TEXT:
        fields.fault("generate", "goes with a {*} slot only")
    if "top_k" in fields or "calibration" in fields:
        fields.fault("generate", "does not go with top_k or calibration")
    if fields.value["generate"] is True:
        return
    sampling = fields.value["generate"]
    if not isinstance(sampling, dict):
        fields.fault("generate", "must be true or an object")
        return
    settings = Fields(sampling, fields.place("generate"), fields.faults)
    settings.refuse_unknown(_GENERATE_FIELDS)
    settings.number("temperature", 0, _MAX_TEMPERATURE)
    settings.number("top_p", _SMALLEST_POSITIVE, 1)
    settings.integer("top_k", 1, _MAX_CANDIDATES)
    settings.integer("seed", _SEED_MIN, _SEED_MAX)
    settings.integer("n", 1, _MAX_SEQUENCES)
