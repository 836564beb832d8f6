"""From the answers of one content to category scores and a decision: pure float64 arithmetic, no numpy, no I/O."""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spinf_serve.packs.micro_layer import layer_value
from spinf_serve.packs.model import (
    ANY,
    MAX,
    MICRO_LAYER,
    MODES,
    OPTION,
    PAIR,
    Category,
    MicroLayer,
    PackModel,
    Quantiles,
    Read,
)

P_CLIP = 1e-9
PAIR_CLIP = 1e-6
LOCK_WARNING = "the micro-layer's lock does not match the pack, which was edited: the fallback mode decided"

Answers = Mapping[tuple[str, str | None], Sequence[float]]
"""(query id, value of F or None) → the probability of each option, in the query's order."""


class EvaluationError(ValueError):
    """A result that cannot be evaluated, or a call that asks for what the pack does not have."""


@dataclass(frozen=True, slots=True)
class Overrides:
    """What a call changes of the pack's decision; None (an absent category) leaves the pack's own value."""

    mode: str | None = None
    threshold: float | None = None
    thresholds: Mapping[str, float | None] | None = None
    critical: Sequence[str] | None = None


def evaluate(pack: PackModel, answers: Answers, overrides: Overrides | None = None) -> dict[str, Any]:
    """`{"categories": …, "decision": …}` in full precision. Raises `EvaluationError`."""
    if pack.draft:
        raise EvaluationError(f"{pack.id} is a draft: fit it before it is evaluated")
    overrides = overrides or Overrides()
    check_overrides(pack, overrides)
    thresholds = {name: c.threshold for name, c in pack.categories.items()} | dict(overrides.thresholds or {})
    z = {read.id: (read_value(read, answers) - read.mean) / read.sd for read in pack.reads}
    macros = category_macros(pack, z)
    scores = {name: sigmoid(c.platt[0] * macros[name] + c.platt[1]) for name, c in pack.categories.items()}
    flags = category_flags(pack, scores, thresholds)
    categories = {
        name: {
            "score": scores[name],
            "percentile": percentile(c.normal_quantiles, scores[name]),
            "flagged": flags[name],
        }
        for name, c in pack.categories.items()
    }
    deciding = [name for name, c in pack.categories.items() if c.decides and thresholds[name] is not None]
    decision = _decide(pack, overrides, z, macros, scores, flags, deciding)
    _apply_critical(decision, pack.decision.critical if overrides.critical is None else overrides.critical, flags)
    return {"categories": categories, "decision": decision}


def check_overrides(pack: PackModel, overrides: Overrides) -> None:
    """Raises `EvaluationError` for a category, mode or threshold that the pack cannot use."""
    for name in (*(overrides.thresholds or ()), *(overrides.critical or ())):
        if name not in pack.categories:
            raise EvaluationError(f"{pack.id} has no category {name[:64]!r}")
    mode = overrides.mode or pack.decision.mode
    if mode not in MODES:
        raise EvaluationError(f"mode must be one of {', '.join(MODES)}")
    if problem := mode_problem(pack, mode, overrides.threshold):
        raise EvaluationError(problem)
    for threshold in (overrides.thresholds or {}).values():
        if threshold is not None and not 0 <= threshold <= 1:
            raise EvaluationError("a category's threshold is from 0 to 1, or None")


def mode_problem(pack: PackModel, mode: str, threshold: float | None) -> str | None:
    """Why this pack cannot decide in this mode with this `threshold`, or None."""
    if mode == MICRO_LAYER:
        if pack.decision.micro_layer is None:
            return f"{pack.id} has no micro-layer"
        return None if threshold is None or math.isfinite(threshold) else "the threshold must be finite"
    if mode == MAX:
        if threshold is None and pack.decision.max_threshold is None:
            return f"{pack.id} has no threshold for max: give one"
        return None if threshold is None or 0 <= threshold <= 1 else "the threshold of max is from 0 to 1"
    return None if threshold is None else "threshold does not go with per_category: use thresholds"


def read_value(read: Read, answers: Answers) -> float:
    """The read's value before it is standardised."""
    try:
        p = [max(float(x), P_CLIP) for x in answers[read.query, read.F]]
    except KeyError:
        raise EvaluationError(f"read {read.id}: the result holds no answer of its query") from None
    if read.kind == PAIR:
        q = min(max(p[0] / (p[0] + p[1]), PAIR_CLIP), 1 - PAIR_CLIP)
        return read.sign * (math.log(q) - math.log1p(-q))
    total = math.log(math.fsum(p))
    a = [math.log(x) - total - mu for x, mu in zip(p, read.mu, strict=True)]
    if read.kind == OPTION:
        return a[read.option]
    if read.kind == ANY:
        return logsumexp(a[1:]) - a[0]
    rest = [x for i, x in enumerate(a) if i not in read.unsafe]
    return logsumexp([a[i] for i in read.unsafe]) - logsumexp(rest)


def logsumexp(values: Sequence[float]) -> float:
    """log Σ exp(values), stable; `values` is not empty."""
    top = max(values)
    return top + math.log(math.fsum(math.exp(x - top) for x in values))


def sigmoid(x: float) -> float:
    """1 / (1 + exp(-x)) without overflow."""
    if x >= 0:
        return 1 / (1 + math.exp(-x))
    e = math.exp(x)
    return e / (1 + e)


def category_macros(pack: PackModel, z: Mapping[str, float]) -> dict[str, float]:
    """Each category's mean z; with views, the mean over views of each view's mean."""
    reads: dict[str, list[Read]] = {name: [] for name in pack.categories}
    for read in pack.reads:
        reads[read.category].append(read)
    return {name: _macro(category, reads[name], z) for name, category in pack.categories.items()}


def _macro(category: Category, reads: Sequence[Read], z: Mapping[str, float]) -> float:
    if not category.views:
        return _mean([z[read.id] for read in reads])
    views: dict[str, list[float]] = {}
    for read in reads:
        if read.view is not None:
            views.setdefault(read.view, []).append(z[read.id])
    return _mean([_mean(view) for view in views.values()])


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def percentile(quantiles: Quantiles | None, score: float) -> float | None:
    """Linear interpolation of a score among `values`, clamped to the first and last level."""
    if quantiles is None:
        return None
    levels, values = quantiles.levels, quantiles.values
    above = bisect_right(values, score)
    if above == 0:
        return levels[0]
    if above == len(values):
        return levels[-1]
    low, high = values[above - 1], values[above]
    return levels[above - 1] + (levels[above] - levels[above - 1]) * (score - low) / (high - low)


def category_flags(
    pack: PackModel, scores: Mapping[str, float], thresholds: Mapping[str, float | None]
) -> dict[str, bool | None]:
    """score ≥ threshold, null without one; then a flag falls while any category that it requires is not flagged.

    A fallen flag can make others fall, so this repeats until nothing changes: the order of categories is irrelevant.
    """
    flags: dict[str, bool | None] = {
        name: None if (cut := thresholds[name]) is None else scores[name] >= cut for name in pack.categories
    }
    falling = True
    while falling:
        fallen = [
            name
            for name, category in pack.categories.items()
            if flags[name] and not all(flags[required] for required in category.requires)
        ]
        flags.update(dict.fromkeys(fallen, False))
        falling = bool(fallen)
    return flags


def _decide(
    pack: PackModel,
    overrides: Overrides,
    z: Mapping[str, float],
    macros: Mapping[str, float],
    scores: Mapping[str, float],
    flags: Mapping[str, bool | None],
    deciding: Sequence[str],
) -> dict[str, Any]:
    mode, threshold, layer = overrides.mode or pack.decision.mode, overrides.threshold, pack.decision.micro_layer
    warning: dict[str, Any] = {}
    if mode == MICRO_LAYER:
        assert layer is not None  # check_overrides
        if layer.locked:
            return _by_layer(layer, layer_inputs(layer, z, macros), threshold)
        # A threshold was meant for the layer's value: the fallback keeps the pack's own.
        mode, threshold, warning = pack.decision.fallback, None, {"warning": LOCK_WARNING}
    if mode == MAX:
        return _by_max(scores, deciding, pack.decision.max_threshold if threshold is None else threshold) | warning
    named = [name for name in deciding if flags[name]]
    return {"unsafe": bool(named), "mode": mode, "categories": named} | warning


def layer_inputs(layer: MicroLayer, z: Mapping[str, float], macros: Mapping[str, float]) -> list[float]:
    """`c:` reads a category's macro, `r:` a read's z."""
    sources = {"c": macros, "r": z}
    return [sources[kind][name] for kind, _, name in (entry.partition(":") for entry in layer.inputs)]


def _by_layer(layer: MicroLayer, x: Sequence[float], threshold: float | None) -> dict[str, Any]:
    value, cut = layer_value(layer, x), layer.threshold if threshold is None else threshold
    return {"unsafe": value >= cut, "mode": MICRO_LAYER, "score": value, "threshold": cut}


def _by_max(scores: Mapping[str, float], deciding: Sequence[str], threshold: float | None) -> dict[str, Any]:
    assert threshold is not None  # check_overrides, and the parser for a fallback
    top = max(deciding, key=scores.__getitem__, default=None)
    score = 0.0 if top is None else scores[top]
    unsafe = top is not None and score >= threshold
    return {"unsafe": unsafe, "mode": MAX, "score": score, "threshold": threshold, "category": top}


def _apply_critical(decision: dict[str, Any], critical: Sequence[str], flags: Mapping[str, bool | None]) -> None:
    """A flagged critical category forces unsafe, whatever decided before."""
    flagged = [name for name in dict.fromkeys(critical) if flags[name]]
    if not flagged:
        return
    decision["critical"] = flagged
    if not decision["unsafe"]:
        decision |= {"unsafe": True, "by": "critical"}
