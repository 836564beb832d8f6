"""Question templates: placeholders, the one slot, and the combinations that fill them."""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

MAX_PLACEHOLDERS = 5
MAX_COMBINATIONS = 1000
MAX_VALUE_CHARS = 256

SCORED = "?"
TEXT = "*"
SLOTS = (SCORED, "n", "$", TEXT)

_NAME = re.compile(r"[A-Za-z0-9_]+", re.ASCII)
_BRACE = re.compile(r"[{}]")


class TemplateError(ValueError):
    """A template that breaks the grammar; the message never quotes it."""


@dataclass(frozen=True, slots=True)
class Template:
    """A parsed template: literals[0] names[0] literals[1] … literals[-1], then the slot.

    slot      `?` scored, `n` number, `$` amount, `*` text
    end       the text at which a `*` answer ends, "" for every other slot
    """

    literals: tuple[str, ...]
    names: tuple[str, ...]
    slot: str
    end: str = ""

    @property
    def placeholders(self) -> tuple[str, ...]:
        """Distinct names in template order."""
        return tuple(dict.fromkeys(self.names))

    def fill(self, values: Mapping[str, str]) -> str:
        """The text before the slot. Values are inserted as they are, never scanned for braces."""
        parts = [self.literals[0]]
        for name, literal in zip(self.names, self.literals[1:], strict=True):
            parts += (values[name], literal)
        return "".join(parts)

    def filled_chars(self, values: Mapping[str, str]) -> int:
        """len(fill(values)) without building it: a value may be repeated more often than memory allows."""
        return sum(map(len, self.literals)) + sum(len(values[name]) for name in self.names)


def parse_template(text: str) -> Template:
    """Parses a template. Raises `TemplateError`: an unmatched brace, a bad name, or not exactly one slot at the end."""
    literals: list[list[str]] = [[]]
    names: list[str] = []
    slots: list[str] = []
    for literal, name in _pieces(text):
        literals[-1].append(literal)
        if name is None:
            continue
        if slots:
            raise TemplateError("the slot is not the last brace of the template")
        if name in SLOTS:
            slots.append(name)
        else:
            names.append(name)
        literals.append([])
    if not slots:
        raise TemplateError("the template has no slot: one of {?}, {n}, {$}, {*}")
    end = "".join(literals.pop())
    if end and slots != [TEXT]:
        raise TemplateError(f"text follows {{{slots[0]}}}, which must end the template")
    if "\n" in end or "\r" in end:
        raise TemplateError("the text after {*} holds a line break")
    if len(set(names)) > MAX_PLACEHOLDERS:
        raise TemplateError(f"more than {MAX_PLACEHOLDERS} different placeholders")
    return Template(tuple(map("".join, literals)), tuple(names), slots[0], end)


def _pieces(text: str) -> Iterator[tuple[str, str | None]]:
    """Splits at braces: (literal before, name in braces), or (literal, None) for an escaped brace and for the rest."""
    at = 0
    while match := _BRACE.search(text, at):
        start, brace = match.start(), match.group()
        if text.startswith(brace, start + 1):
            yield text[at : start + 1], None
            at = start + 2
            continue
        close = text.find("}", start) if brace == "{" else -1
        if close < 0:
            raise TemplateError(f"unmatched {brace} at character {start} (write {brace * 2} for a literal brace)")
        name = text[start + 1 : close]
        if name not in SLOTS and not _NAME.fullmatch(name):
            raise TemplateError(f"bad name in braces at character {start}: letters, digits and _ only")
        yield text[at:start], name
        at = close + 1
    yield text[at:], None


class Combinations:
    """The placeholder values of a query, one mapping per prompt, in request order; a product is not spelled out."""

    def __init__(self, axes: Mapping[str, Sequence[str]] | None = None, rows: Sequence[Mapping[str, str]] = ()) -> None:
        self._axes = axes
        self._rows = rows
        self._len = len(rows) if axes is None else product_size(axes)

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[Mapping[str, str]]:
        if self._axes is None:
            return iter(self._rows)
        # The first name varies slowest, the last one fastest.
        return (dict(zip(self._axes, row, strict=True)) for row in itertools.product(*self._axes.values()))


def product_size(axes: Mapping[str, Sequence[str]]) -> int:
    """How many combinations `"all"` means over these values."""
    return math.prod(map(len, axes.values()))
