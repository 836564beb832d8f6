"""Places in a request body, and the one fault that is reported: the first in document order."""

import sys
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from spinf_serve.protocol.errors import RequestError

_MAX_STEP_CHARS = 64
"""A caller's own field name in a `param` is cut to this length: an error never quotes long input."""

_AFTER = sys.maxsize


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value stands: the steps from the root, and each step's rank among its siblings.

    Places compare by `order`: a container comes before what it holds, and siblings in the order they were sent.
    """

    path: tuple[str | int, ...] = ()
    order: tuple[int, ...] = ()

    def item(self, index: int) -> "Place":
        return Place((*self.path, index), (*self.order, index))

    def named(self, name: str) -> "Place":
        """A field that is absent: it is missed where its object stands."""
        return Place((*self.path, name), self.order)

    def end(self) -> "Place":
        """The same path, ranked after everything inside: a fault of a value that is sound in itself."""
        return Place(self.path, (*self.order, _AFTER))

    def param(self) -> str | None:
        """The public dotted path, or None for the root."""
        return ".".join(_clip(str(step)) for step in self.path) or None


def _clip(step: str) -> str:
    return step if len(step) <= _MAX_STEP_CHARS else step[:_MAX_STEP_CHARS] + "…"


class Faults:
    """Collects faults in any order and keeps the one that stands first; on one place the first that was found."""

    def __init__(self) -> None:
        self.first: RequestError | None = None
        self._order: tuple[int, ...] = ()

    def add(self, place: Place, code: str, message: str) -> None:
        if self.first is None or place.order < self._order:
            self.first = RequestError(code, message, place.param())
            self._order = place.order

    def before(self, place: Place) -> bool:
        """Whether a fault at `place` would come too late to be reported."""
        return self.first is not None and self._order <= place.order

    def check(self) -> None:
        """Raises the first fault, if there is one."""
        if self.first is not None:
            raise self.first


class Fields:
    """An object of the request, read field by field. A wrong field is a fault and reads as its default."""

    def __init__(self, value: dict[str, Any], place: Place, faults: Faults) -> None:
        self.value, self.at, self.faults = value, place, faults
        self._ranks = {name: rank for rank, name in enumerate(value)}

    def __contains__(self, name: str) -> bool:
        return name in self.value

    def place(self, name: str) -> Place:
        rank = self._ranks.get(name)
        if rank is None:
            return self.at.named(name)
        return Place((*self.at.path, name), (*self.at.order, rank))

    def fault(self, name: str, message: str, code: str = "invalid_field") -> None:
        self.faults.add(self.place(name), code, message)

    def refuse_unknown(self, known: Collection[str]) -> None:
        for name in self.value:
            if name not in known:
                self.fault(name, "unknown field")
                return

    def string(
        self, name: str, *, min_chars: int = 0, max_chars: int | None = None, required: bool = False
    ) -> str | None:
        """The field's string within its length in characters, or None."""
        value = self._field(name, str, "a string", required)
        if value is None:
            return None
        if len(value) < min_chars or (max_chars is not None and len(value) > max_chars):
            self.fault(name, f"must have {min_chars} to {max_chars} characters")
            return None
        return str(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self._field(name, bool, "true or false")
        return default if value is None else bool(value)

    def items(self, name: str, *, required: bool = False) -> list[Any] | None:
        value: list[Any] | None = self._field(name, list, "a list", required)
        return value

    def object(self, name: str, *, required: bool = False) -> "Fields | None":
        value = self._field(name, dict, "an object", required)
        return None if value is None else Fields(value, self.place(name), self.faults)

    def number(self, name: str, low: float, high: float, *, required: bool = False) -> float | None:
        """An integer or a float within [low, high], or None."""
        return self._within(name, (int, float), "a number", low, high, required)

    def integer(self, name: str, low: int, high: int | None = None) -> int | None:
        """An integer within [low, high], or None; 5.0 is not an integer."""
        value = self._within(name, int, "an integer", low, high, False)
        return None if value is None else int(value)

    def _within(
        self, name: str, kind: type | tuple[type, ...], what: str, low: float, high: float | None, required: bool
    ) -> float | None:
        value: float | None = self._field(name, kind, what, required)
        if value is not None and (value < low or (high is not None and value > high)):
            self.fault(name, f"must be at least {low}" if high is None else f"must be within {low} and {high}")
            return None
        return value

    def _field(self, name: str, kind: type | tuple[type, ...], what: str, required: bool = False) -> Any:
        if name not in self.value:
            if required:
                self.fault(name, "missing")
            return None
        value = self.value[name]
        # JSON true is no number, although Python's bool is an int.
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            self.fault(name, f"must be {what}")
            return None
        return value
