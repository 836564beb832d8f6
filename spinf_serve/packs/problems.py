"""Every problem of a pack file or repository, collected: one run shows an author all there is to repair."""

import difflib
from collections.abc import Collection
from typing import Any

from spinf_serve.protocol.document import Faults, Fields, Place


class PackError(ValueError):
    """A pack or a pack repository that cannot be used. `problems` lists each one, with the place where it stands."""

    def __init__(self, what: str, problems: list[str]) -> None:
        self.what, self.problems = what, problems
        super().__init__(f"{what}: {'; '.join(problems)}")


MAX_LISTED = 1000
"""Problems, and warnings, of one file: more than anyone repairs at once, fewer than a hostile file can make."""
MORE = f"and more: the first {MAX_LISTED} are listed"


class Problems(Faults):
    """Collects all faults instead of the first, each as `path: message`, in the order they were found.

    Of a file with over `MAX_LISTED` of them, `MORE` says that the rest is left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.warnings: list[str] = []

    def add(self, place: Place, code: str, message: str) -> None:
        _listed(self.found, place, message)

    def at(self, place: Place, message: str) -> None:
        self.add(place, "", message)

    def warn(self, place: Place, message: str) -> None:
        _listed(self.warnings, place, message)

    def before(self, place: Place) -> bool:
        return False


def _listed(lines: list[str], place: Place, message: str) -> None:
    if len(lines) < MAX_LISTED:
        lines.append(described(place, message))
    elif len(lines) == MAX_LISTED:
        lines.append(MORE)


def described(place: Place, message: str) -> str:
    where = place.param()
    return f"{where}: {message}" if where else message


def fields_of(value: Any, place: Place, problems: Problems) -> Fields | None:
    """The object at `place`, or None and a problem."""
    if isinstance(value, dict):
        return Fields(value, place, problems)
    problems.at(place, "must be an object")
    return None


_MAX_HINTS = 20
_MAX_HINTED_CHARS = 64


def unknown_keys(fields: Fields, known: Collection[str]) -> list[tuple[Place, str]]:
    """Place and message of every key that is not one of `known`; the first ones with a guess at what was meant."""
    found: list[tuple[Place, str]] = []
    for name in fields.value:
        if name not in known:
            guessed = len(found) < _MAX_HINTS and len(name) <= _MAX_HINTED_CHARS
            near = difflib.get_close_matches(name, list(known), n=1) if guessed else []
            hint = f" (did you mean {near[0]}?)" if near else ""
            found.append((fields.place(name), f"unknown key{hint}"))
    return found


MAX_NUMBER = 1e100
"""Of a pack's numbers (and its inverse of a spread): so no evaluation can overflow, whatever the answers are."""


def is_number(value: Any) -> bool:
    """A JSON number within ±`MAX_NUMBER`."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER
