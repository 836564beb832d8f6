"""Where a content may be cut so that tokens left and right of the cut never depend on each other.

A rule is an object with one method, `last_clean(text)`. `AdjacentPairs` is the rule for vocabularies whose pieces are
written in characters (Gemma). A byte-level vocabulary needs a rule of its own over bytes and its pre-tokenizer.
"""

from collections.abc import Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

WINDOW = 256  # characters from the end in which a cut is looked for
_MAX_KNOWN = 1 << 16  # pairs whose answer is kept
_SHIFT = 21  # bits of a code point
_SEPARATOR = "\ud800"  # stands between pieces; a lone surrogate is in no piece and in no text

I64 = npt.NDArray[np.int64]


class CutRule(Protocol):
    def last_clean(self, text: str) -> int | None:
        """The last position p in [0, len(text)] at most `WINDOW` characters from the end at which a cut is clean.

        Clean: for ANY continuation c, tokens(text[:p]) + tokens(text[p:] + c) = tokens(text + c). None where the window
        holds no such place.
        """
        ...

    def first_clean(self, text: str) -> int | None:
        """The first position p in (0, len(text)), within `WINDOW`, that is clean whatever stands on either side.

        For ANY b and c, tokens(b + text[:p]) + tokens(text[p:] + c) = tokens(b + text + c). None without such a place.
        """
        ...


def code_points(text: str) -> I64:
    """The code points of `text`, int64 [len(text)]; surrogates stand for themselves."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.int64)


class AdjacentPairs:
    """A cut between characters a|b is clean when no piece of the vocabulary holds a and b side by side.

    A token that crossed the cut would hold a and b side by side: BPE only ever joins neighbours into pieces of the
    vocabulary, pieces matched before BPE are pieces too, and a character that the vocabulary lacks becomes bytes that
    never merge. With no token across the cut, nothing on one side can change the other. Spaces are read as "▁", which
    is what the pieces hold.
    """

    def __init__(self, pieces: Iterable[str]) -> None:
        points = code_points(_SEPARATOR + _SEPARATOR.join(pieces).replace(" ", "▁") + _SEPARATOR)
        first, second = points[:-1], points[1:]
        separator = ord(_SEPARATOR)
        inside = (first != separator) & (second != separator)
        self._pairs: I64 = np.unique(first[inside] << _SHIFT | second[inside])
        self._known: dict[str, bool] = {}
        self._openers: I64 = np.unique(self._pairs >> _SHIFT)  # characters that some piece continues

    def last_clean(self, text: str) -> int | None:
        """See `CutRule`. The text's start is clean, and so is its end after a character that no piece continues."""
        start = max(0, len(text) - WINDOW - 1)
        points = code_points(text[start:].replace(" ", "▁"))
        if not points.size:
            return 0
        if not _member(points[-1:], self._openers)[0]:
            return len(text)
        clean = np.flatnonzero(~_member(points[:-1] << _SHIFT | points[1:], self._pairs))
        if clean.size:
            return start + int(clean[-1]) + 1
        return 0 if len(text) <= WINDOW else None

    def first_clean(self, text: str) -> int | None:
        """See `CutRule`."""
        for p in range(1, min(len(text), WINDOW)):
            if self._apart(text[p - 1 : p + 1]):
                return p
        return None

    def _apart(self, pair: str) -> bool:
        """Whether no piece holds the two characters side by side; remembered, since texts begin and end alike."""
        known = self._known.get(pair)
        if known is None:
            first, second = code_points(pair.replace(" ", "▁"))
            known = not bool(_member(np.array([first << _SHIFT | second]), self._pairs)[0])
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[pair] = known
        return known


def _member(values: I64, ascending: I64) -> npt.NDArray[np.bool_]:
    """Which of `values` are in the sorted array `ascending`, bool [len(values)]."""
    if not ascending.size:
        return np.zeros(values.shape, np.bool_)
    found = np.minimum(np.searchsorted(ascending, values), ascending.size - 1)
    return np.asarray(ascending[found] == values)
