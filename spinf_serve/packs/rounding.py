"""Numbers of a result entry: 6 decimals, never -0.0."""

from typing import Any

DECIMALS = 6


def rounded(value: Any) -> Any:
    """The same nested value with every float rounded to 6 decimals."""
    if isinstance(value, float):
        return round(value, DECIMALS) + 0.0
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return value
