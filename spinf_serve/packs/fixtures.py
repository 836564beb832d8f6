"""Fixtures: recorded results of a pack and what their evaluation must give, to 1e-6.

`{"results": [entry of a response's results, …], "expected": [{"input_id", "with"?: {mode, threshold, thresholds,
critical}, "categories": {…}, "decision": {…}}, …]}`. Several expectations may read one result.
"""

import math
from pathlib import Path
from typing import Any

from spinf_serve.packs.evaluation import EvaluationError
from spinf_serve.packs.pack import MAX_FILE_BYTES, Pack, json_of
from spinf_serve.packs.problems import PackError

TOLERANCE = 1e-6
# Both sides are rounded to 6 decimals, so a difference of one unit in the last place is exactly the tolerance.
_SLACK = 1e-12
_WITH = frozenset({"mode", "threshold", "thresholds", "critical"})


def check_fixture(pack: Pack, path: Path) -> list[str]:
    """What is wrong with a fixture file or differs from it; empty where the pack evaluates as recorded."""
    try:
        with path.open("rb") as file:
            data = json_of(file.read(MAX_FILE_BYTES + 1), path.name)
    except OSError as error:
        return [f"cannot be read: {error.strerror or error}"]
    except PackError as error:
        return error.problems
    results, expected = (data.get(name) if isinstance(data, dict) else None for name in ("results", "expected"))
    if not isinstance(results, list) or not isinstance(expected, list) or not expected:
        return ["must hold the lists results and expected"]
    by_id = {name: r for r in results if isinstance(r, dict) and isinstance(name := r.get("input_id"), str)}
    return [problem for i, item in enumerate(expected) for problem in _check(pack, by_id, item, f"expected.{i}")]


def _check(pack: Pack, results: dict[Any, Any], item: Any, where: str) -> list[str]:
    if not isinstance(item, dict) or not {"categories", "decision"} <= item.keys():
        return [f"{where}: must hold input_id, categories and decision"]
    call = item.get("with", {})
    if not isinstance(call, dict) or not call.keys() <= _WITH:
        return [f"{where}.with: must hold of {', '.join(sorted(_WITH))} only"]
    if not isinstance(item.get("input_id"), str) or item["input_id"] not in results:
        return [f"{where}: no result has this input_id"]
    try:
        entry = pack.evaluate(results[item["input_id"]], **call)
    except (EvaluationError, LookupError, TypeError, ValueError) as error:
        return [f"{where}: cannot be evaluated: {error}"]
    return [
        f"{where}.{place}: is {got!r}, expected {want!r}"
        for name in ("categories", "decision")
        for place, got, want in differences(entry[name], item[name], name)
    ]


def differences(got: Any, want: Any, place: str) -> list[tuple[str, Any, Any]]:
    """Where two nested values differ, numbers by more than the tolerance: (place, got, wanted)."""
    if isinstance(got, dict) and isinstance(want, dict):
        names = [*got, *(name for name in want if name not in got)]
        return [d for name in names for d in differences(got.get(name), want.get(name), f"{place}.{name}")]
    if _is_number(got) and _is_number(want):
        same = math.isclose(got, want, rel_tol=0, abs_tol=TOLERANCE + _SLACK)
    else:
        same = type(got) is type(want) and got == want
    return [] if same else [(place, got, want)]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
