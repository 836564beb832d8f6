"""The `scoring` of a pack: scored queries without a group, each with at most the placeholder `F`."""

from typing import Any

from spinf_serve.packs.model import Query
from spinf_serve.packs.problems import Problems, fields_of, unknown_keys
from spinf_serve.protocol.document import Fields, Place
from spinf_serve.protocol.queries import MAX_ID_CHARS
from spinf_serve.templates import MAX_COMBINATIONS, MAX_VALUE_CHARS, SCORED, TemplateError, parse_template

PLACEHOLDER = "F"
_SCORING = ("queries", "empty_floor", "case_insensitive")
_QUERY = ("id", "template", "options", "combinations", "values", "empty_floor")
_MIN_OPTIONS = 2


def parse_scoring(scoring: Fields, problems: Problems) -> tuple[tuple[Query, ...], bool]:
    """The queries that can be read at all, and the case rule."""
    _refuse_unknown(scoring, _SCORING, problems)
    floor = scoring.boolean("empty_floor", True)
    case_insensitive = scoring.boolean("case_insensitive", False)
    entries = scoring.items("queries", required=True) or []
    place, queries, ids = scoring.place("queries"), list[Query](), set[str]()
    if "queries" in scoring and not entries:
        problems.at(place, "must hold at least one query")
    for i, entry in enumerate(entries):
        fields = fields_of(entry, place.item(i), problems)
        if fields is None:
            continue
        query = _query(fields, problems, floor, case_insensitive)
        if query.id and query.id in ids:
            problems.at(fields.place("id"), "repeats the id of another query")
        elif query.id:
            ids.add(query.id)
            queries.append(query)
    return tuple(queries), case_insensitive


def _refuse_unknown(fields: Fields, known: tuple[str, ...], problems: Problems) -> None:
    for place, message in unknown_keys(fields, known):
        problems.at(place, message)


def _query(fields: Fields, problems: Problems, floor: bool, case_insensitive: bool) -> Query:
    for place, message in unknown_keys(fields, _QUERY):
        grouped = place.path[-1] == "group"
        problems.at(place, "a pack's queries have no group: the pack is one" if grouped else message)
    template, has_placeholder = _template(fields)
    return Query(
        id=fields.string("id", min_chars=1, max_chars=MAX_ID_CHARS, required=True) or "",
        template=template,
        options=_options(fields, problems, case_insensitive),
        values=_values(fields, problems) if has_placeholder else _no_values(fields),
        empty_floor=fields.boolean("empty_floor", floor),
    )


def _template(fields: Fields) -> tuple[str, bool]:
    text = fields.string("template", required=True)
    if text is None:
        return "", "combinations" in fields
    try:
        template = parse_template(text)
    except TemplateError as error:
        fields.fault("template", str(error))
        return text, "combinations" in fields
    if template.slot != SCORED:
        fields.fault("template", "a pack asks scored questions only: the slot must be {?}")
    for name in template.placeholders:
        if name != PLACEHOLDER:
            fields.fault("template", f"{{{name[:64]}}}: the only placeholder of a pack's query is {{F}}")
    return text, PLACEHOLDER in template.placeholders or "combinations" in fields


def _options(fields: Fields, problems: Problems, case_insensitive: bool) -> tuple[str, ...]:
    """Every option that is sent, so that a read's index means what the author counts; faulty ones are empty."""
    options = fields.items("options", required=True) or []
    place, seen = fields.place("options"), dict[str, int]()
    if "options" in fields and len(options) < _MIN_OPTIONS:
        problems.at(place, "must hold at least two options")
    texts = []
    for i, option in enumerate(options):
        text = option if isinstance(option, str) else ""
        texts.append(text)
        if not text:
            problems.at(place.item(i), "an option must be a string that is not empty")
            continue
        key = text.strip().casefold() if case_insensitive else text
        if seen.setdefault(key, i) != i:
            aside = ", case and outer spaces aside" if case_insensitive else ""
            problems.at(place.item(i), f"repeats option {seen[key]}{aside}")
    return tuple(texts)


def _no_values(fields: Fields) -> tuple[str | None, ...]:
    if "values" in fields:
        fields.fault("values", "the template has no placeholder")
    return (None,)


def _values(fields: Fields, problems: Problems) -> tuple[str | None, ...]:
    """The values of F, from a list of combinations or from "all" with `values`."""
    combinations = fields.value.get("combinations")
    if combinations == "all":
        values = fields.object("values", required=True)
        rows = None if values is None else values.items(PLACEHOLDER, required=True)
        if values is not None:
            _refuse_unknown(values, (PLACEHOLDER,), problems)
        placed = [] if rows is None or values is None else _placed(rows, values.place(PLACEHOLDER))
        return _distinct(placed, fields.place("values"), problems)
    if "values" in fields:
        fields.fault("values", 'goes with "combinations": "all" only')
    if isinstance(combinations, str):
        fields.fault("combinations", 'must be a list, or "all"')
        return ()
    rows = fields.items("combinations", required=True)
    if rows is None:
        return ()
    placed = []
    for row, place in _placed(rows, fields.place("combinations")):
        row_fields = fields_of(row, place, problems)
        if row_fields is not None:
            _refuse_unknown(row_fields, (PLACEHOLDER,), problems)
            placed.append((row.get(PLACEHOLDER), row_fields.place(PLACEHOLDER)))
    return _distinct(placed, fields.place("combinations"), problems)


def _placed(rows: list[Any], place: Place) -> list[tuple[Any, Place]]:
    return [(row, place.item(i)) for i, row in enumerate(rows)]


def _distinct(placed: list[tuple[Any, Place]], whole: Place, problems: Problems) -> tuple[str | None, ...]:
    if not placed:
        problems.at(whole, "must hold at least one value of F")
    if len(placed) > MAX_COMBINATIONS:
        problems.at(whole, f"must hold at most {MAX_COMBINATIONS} combinations")
    values = dict[str | None, None]()
    for value, place in placed:
        if not isinstance(value, str):
            problems.at(place, "must be a string")
        elif len(value) > MAX_VALUE_CHARS:
            problems.at(place, f"must have at most {MAX_VALUE_CHARS} characters")
        elif value in values:
            problems.at(place, "repeats a value of F")
        else:
            values[value] = None
    return tuple(values)
