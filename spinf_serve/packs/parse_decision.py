"""The `categories` and the `decision` of a pack."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from spinf_serve.packs.micro_layer import decode_weights, lock_of, weight_count
from spinf_serve.packs.model import (
    MAX,
    MICRO_LAYER,
    MODES,
    PER_CATEGORY,
    Category,
    Decision,
    MicroLayer,
    Quantiles,
    Read,
)
from spinf_serve.packs.problems import Problems, fields_of, is_number, unknown_keys
from spinf_serve.protocol.document import Fields
from spinf_serve.protocol.queries import MAX_ID_CHARS

_CATEGORY = ("label", "platt", "threshold", "normal_quantiles", "aggregate", "requires", "decides", "description")
_DECISION = ("mode", "fallback", "max", "micro_layer", "critical")
_LAYER = ("inputs", "weights", "hidden", "dtype", "lock")
_FALLBACKS = (PER_CATEGORY, MAX)
_LOCK_PREFIX = "sha256:"
_MAX_HIDDEN = 65_536


def parse_categories(root: Fields, problems: Problems, *, draft: bool) -> tuple[dict[str, Category], bool]:
    """The categories, and whether any lacks what is fitted (only `draft` allows that)."""
    entries = root.object("categories", required=True)
    categories, unfitted = dict[str, Category](), False
    if entries is None:
        return categories, unfitted
    if not entries.value:
        problems.at(root.place("categories"), "must hold at least one category")
    for name, value in entries.value.items():
        place = entries.place(name)
        if not 1 <= len(name) <= MAX_ID_CHARS:
            problems.at(place, f"an id has 1 to {MAX_ID_CHARS} characters")
        fields = fields_of(value, place, problems)
        if fields is not None:
            categories[name] = _category(name, fields, entries.value, problems, draft)
            unfitted |= "platt" not in fields or "threshold" not in fields
    return categories, unfitted


def _category(name: str, fields: Fields, all_categories: dict[str, Any], problems: Problems, draft: bool) -> Category:
    for place, message in unknown_keys(fields, _CATEGORY):
        problems.warn(place, message)
    aggregate = fields.value.get("aggregate")
    if aggregate not in (None, "views") or ("aggregate" in fields and aggregate is None):
        fields.fault("aggregate", 'must be "views" where it is given')
    requires = _known_ids(fields, "requires", all_categories, problems)
    if name in requires:
        fields.fault("requires", "a category cannot require itself")
    return Category(
        id=name,
        label=fields.string("label", required=True) or name,
        platt=_platt(fields, draft),
        threshold=_threshold(fields, "threshold", required=not draft),
        normal_quantiles=_quantiles(fields),
        views=aggregate == "views",
        requires=requires,
        decides=fields.boolean("decides", True),
    )


def _known_ids(fields: Fields, name: str, known: Mapping[str, Any], problems: Problems) -> tuple[str, ...]:
    ids = dict[str, None]()
    for i, entry in enumerate(fields.items(name) or []):
        place = fields.place(name).item(i)
        if not isinstance(entry, str) or entry not in known:
            problems.at(place, "no such category")
        elif entry in ids:
            problems.at(place, "repeats a category")
        else:
            ids[entry] = None
    return tuple(ids)


def _platt(fields: Fields, draft: bool) -> tuple[float, float]:
    if "platt" not in fields:
        if not draft:
            fields.fault("platt", "missing")
        return 1.0, 0.0
    pair = fields.value["platt"]
    if not isinstance(pair, list) or len(pair) != 2 or not all(map(is_number, pair)):
        fields.fault("platt", "must be two numbers, [a, b]")
        return 1.0, 0.0
    return float(pair[0]), float(pair[1])


def _threshold(fields: Fields, name: str, *, required: bool, nullable: bool = True) -> float | None:
    """A score from 0 to 1, or null."""
    if name not in fields:
        if required:
            fields.fault(name, "missing" + (": a number from 0 to 1, or null" if nullable else ""))
        return None
    value = fields.value[name]
    if value is None and nullable:
        return None
    if not is_number(value) or not 0 <= value <= 1:
        fields.fault(name, "must be a number from 0 to 1" + (", or null" if nullable else ""))
        return None
    return float(value)


def _quantiles(fields: Fields) -> Quantiles | None:
    if fields.value.get("normal_quantiles") is None:
        return None
    quantiles = fields.object("normal_quantiles")
    if quantiles is None:
        return None
    for place, message in unknown_keys(quantiles, ("levels", "values")):
        fields.faults.add(place, "", message)
    levels, values = (_ascending(quantiles, name) for name in ("levels", "values"))
    if levels is None or values is None:
        return None
    if len(levels) != len(values):
        fields.fault("normal_quantiles", "levels and values must be of one length")
        return None
    return Quantiles(levels, values)


def _ascending(fields: Fields, name: str) -> tuple[float, ...] | None:
    numbers = fields.items(name, required=True)
    if numbers is None:
        return None
    if not numbers or not all(is_number(x) and 0 <= x <= 1 for x in numbers):
        fields.fault(name, "must hold numbers from 0 to 1")
        return None
    if any(b < a for a, b in pairwise(numbers)):
        fields.fault(name, "must ascend")
        return None
    return tuple(map(float, numbers))


def check_fed(root: Fields, categories: Mapping[str, Category], reads: tuple[Read, ...], problems: Problems) -> None:
    """Every category is fed by a read; one that aggregates views, by a read with a view."""
    fed = {read.category for read in reads}
    viewed = {read.category for read in reads if read.view is not None}
    entries = root.object("categories")
    for name, category in categories.items():
        assert entries is not None
        if name not in fed:
            problems.at(entries.place(name), "no read feeds this category")
        elif category.views and name not in viewed:
            problems.at(entries.place(name), "aggregates views, but none of its reads has a view")


def parse_decision(
    root: Fields, data: dict[str, Any], reads: tuple[Read, ...], categories: Mapping[str, Category], problems: Problems
) -> Decision:
    """The decision of a fitted pack."""
    fields = root.object("decision", required=True)
    if fields is None:
        return Decision(PER_CATEGORY)
    for place, message in unknown_keys(fields, _DECISION):
        problems.at(place, message)
    mode = fields.string("mode", required=True)
    if mode is not None and mode not in MODES:
        fields.fault("mode", f"must be one of {', '.join(MODES)}")
    fallback = fields.string("fallback")
    if fallback is not None and fallback not in _FALLBACKS:
        fields.fault("fallback", f"must be one of {', '.join(_FALLBACKS)}")
    max_threshold = _max_threshold(fields, problems)
    for name, choice in (("mode", mode), ("fallback", fallback)):
        if choice == MAX and "max" not in fields:
            fields.fault(name, "max needs max.threshold")
    if mode == MICRO_LAYER and "micro_layer" not in fields:
        fields.fault("mode", "there is no micro_layer")
    layer = _micro_layer(fields, data, reads, categories, problems)
    critical = _known_ids(fields, "critical", categories, problems)
    return Decision(mode or PER_CATEGORY, fallback or PER_CATEGORY, max_threshold, layer, critical)


def _max_threshold(fields: Fields, problems: Problems) -> float | None:
    top = fields.object("max")
    if top is None:
        return None
    for place, message in unknown_keys(top, ("threshold",)):
        problems.at(place, message)
    return _threshold(top, "threshold", required=True, nullable=False)


def _micro_layer(
    decision: Fields,
    data: dict[str, Any],
    reads: tuple[Read, ...],
    categories: Mapping[str, Category],
    problems: Problems,
) -> MicroLayer | None:
    fields = decision.object("micro_layer")
    if fields is None:
        return None
    for place, message in unknown_keys(fields, _LAYER):
        problems.at(place, message)
    known = {f"c:{name}" for name in categories} | {f"r:{read.id}" for read in reads}
    inputs = _inputs(fields, known, problems)
    hidden = fields.integer("hidden", 1, _MAX_HIDDEN)
    if fields.value.get("dtype", "float32") != "float32":
        fields.fault("dtype", 'must be "float32"')
    weights = _weights(fields, inputs, hidden)
    lock = fields.string("lock", required=True)
    if lock is not None and not lock.startswith(_LOCK_PREFIX):
        fields.fault("lock", f'must begin with "{_LOCK_PREFIX}"')
    if inputs is None or weights is None or problems.found:
        return None
    locked = lock == lock_of(data)
    if not locked:
        problems.warn(fields.place("lock"), "does not match the pack: the fallback mode decides instead of the layer")
    return MicroLayer(inputs, hidden, weights[:-2], weights[-2], weights[-1], locked)


def _inputs(fields: Fields, known: set[str], problems: Problems) -> tuple[str, ...] | None:
    entries = fields.items("inputs", required=True)
    if entries is None:
        return None
    if not entries:
        fields.fault("inputs", "must hold at least one input")
    place, seen = fields.place("inputs"), set[str]()
    for i, entry in enumerate(entries):
        if not isinstance(entry, str) or entry not in known:
            problems.at(place.item(i), 'must be "c:" and a category or "r:" and a read')
        elif entry in seen:
            problems.at(place.item(i), "repeats an input")
        else:
            seen.add(entry)
    return tuple(map(str, entries))


def _weights(fields: Fields, inputs: tuple[str, ...] | None, hidden: int | None) -> tuple[float, ...] | None:
    text = fields.string("weights", required=True)
    if text is None:
        return None
    try:
        weights = decode_weights(text)
    except ValueError as error:
        fields.fault("weights", str(error))
        return None
    expected = weight_count(len(inputs), hidden) if inputs else len(weights)
    if len(weights) != expected:
        shape = f"{len(inputs or ())} inputs" + (f" and {hidden} hidden units" if hidden else "")
        fields.fault("weights", f"holds {len(weights)} numbers; {shape} need {expected}")
        return None
    return weights
