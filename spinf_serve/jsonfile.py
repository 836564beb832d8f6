"""JSON of files that others wrote: whatever is wrong with one is a `ValueError`."""

import json
from typing import Any


def parse(text: str | bytes, *, unique: bool = False) -> Any:
    """The value. ValueError for what is no JSON or nested too deeply; with `unique` also for a key given twice."""
    try:
        return json.loads(text, object_pairs_hook=_unique if unique else None)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is given twice")
    return value
