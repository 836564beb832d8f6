"""Tries of token paths, laid out flat in depth-first order: filled templates, and under each its options' lead-ins."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from spinf_serve.plan import I32, I64
from workers.preprocess.encoder import Tokens
from workers.preprocess.options import Reading


@dataclass(frozen=True, eq=False, slots=True)
class Gather:
    """Where one reading's numbers stand in the columns of its prompt.

    index    [O, S, L] int64: option, sequence, token → column of the prompt's block; `width` reads as 0 (no further
             token), `width + 1` as minus infinity (no further sequence)
    width    columns of the block
    """

    index: I64
    width: int


@dataclass(frozen=True, eq=False, slots=True)
class OptionTrie:
    """The lead-in tokens of every reading at the end of one filled template, and the columns read at each row.

    Row 0 is the template's last token; row i + 1 is `tokens[i]`, whose parent is row `parents[i]`.
    """

    tokens: list[int]
    parents: list[int]
    counts: list[int]  # columns per row
    cols: I32
    depth: int  # longest lead-in
    gathers: dict[Reading, Gather]


def build_option_trie(readings: Sequence[Reading]) -> OptionTrie:
    """The trie of all sequences of `readings`, each row reading the union of the next tokens."""
    cols_of: dict[Tokens, dict[int, int]] = {(): {}}
    for reading in readings:
        for sequence in (s for owned in reading.sequences for s in owned):
            for end in range(len(sequence)):
                row = cols_of.setdefault(sequence[:end], {})
                row.setdefault(sequence[end], len(row))
    rows = sorted(cols_of)  # lexicographic order of the lead-ins is depth-first order
    rank = {lead: i for i, lead in enumerate(rows)}
    counts = [len(cols_of[lead]) for lead in rows]
    starts = dict(zip(rows, np.concatenate(([0], np.cumsum(counts)[:-1])).tolist(), strict=True))
    cols = np.fromiter((token for lead in rows for token in cols_of[lead]), np.int32, sum(counts))
    return OptionTrie(
        tokens=[lead[-1] for lead in rows[1:]],
        parents=[rank[lead[:-1]] for lead in rows[1:]],
        counts=counts,
        cols=cols,
        depth=max(map(len, rows)),
        gathers={reading: _gather(reading, cols_of, starts, len(cols)) for reading in readings},
    )


def _gather(reading: Reading, cols_of: dict[Tokens, dict[int, int]], starts: dict[Tokens, int], width: int) -> Gather:
    most = max(map(len, reading.sequences))
    longest = max(len(sequence) for owned in reading.sequences for sequence in owned)
    index = np.full((len(reading.sequences), most, longest), width, np.int64)
    for o, owned in enumerate(reading.sequences):
        index[o, len(owned) :, 0] = width + 1
        for s, sequence in enumerate(owned):
            for end in range(len(sequence)):
                index[o, s, end] = starts[sequence[:end]] + cols_of[sequence[:end]][sequence[end]]
    return Gather(index, width)


@dataclass(frozen=True, eq=False, slots=True)
class Branch:
    """One prompt below a content: the tokens from the content's prefix to the slot, and what is read there."""

    tokens: Tokens
    reading: Reading


@dataclass(frozen=True, eq=False, slots=True)
class Forest:
    """The tries of a content's groups, one after the other, indices relative to its first token.

    parents     -1: the last token of the prefix
    rows        read rows; -1: the last token of the prefix
    starts      per branch, in the order given: its first column
    gathers     per branch: index into the gathers of the builder
    depth       tokens of the longest path below the prefix
    """

    tokens: I32
    parents: I32
    rows: I32
    counts: I32
    cols: I32
    starts: I64
    gathers: I32
    depth: int


@dataclass
class ForestBuilder:
    """Builds the forests of one request; option tries and gathers are made once and shared by all of them."""

    gathers: list[Gather] = field(default_factory=list)
    _tries: dict[tuple[Reading, ...], OptionTrie] = field(default_factory=dict)
    _gather_ids: dict[Gather, int] = field(default_factory=dict)

    def build(self, groups: Sequence[Sequence[tuple[int, Branch]]], branches: int) -> Forest:
        """Each group is a list of (branch number, branch); every number below `branches` occurs once."""
        return _Layout(self, branches).add_groups(groups).forest()

    def option_trie(self, readings: tuple[Reading, ...]) -> OptionTrie:
        trie = self._tries.get(readings)
        if trie is None:
            trie = self._tries[readings] = build_option_trie(readings)
        return trie

    def gather_id(self, gather: Gather) -> int:
        known = self._gather_ids.setdefault(gather, len(self.gathers))
        if known == len(self.gathers):
            self.gathers.append(gather)
        return known


class _Layout:
    """One forest while it grows."""

    def __init__(self, builder: ForestBuilder, branches: int) -> None:
        self.builder = builder
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.rows: list[int] = []
        self.counts: list[int] = []
        self.cols: list[I32] = []
        self.width = 0
        self.starts = [0] * branches
        self.gathers = [0] * branches
        self.depth = 0

    def add_groups(self, groups: Sequence[Sequence[tuple[int, Branch]]]) -> "_Layout":
        # Branches without a token read the prefix's last row, which every group shares.
        rootless = [item for group in groups for item in group if not item[1].tokens]
        if rootless:
            self._end(-1, 0, rootless)
        for group in groups:
            ends: dict[Tokens, list[tuple[int, Branch]]] = {}
            for item in group:
                if item[1].tokens:
                    ends.setdefault(item[1].tokens, []).append(item)
            self._trie(ends)
        return self

    def _trie(self, ends: dict[Tokens, list[tuple[int, Branch]]]) -> None:
        path: list[int] = []
        last: Tokens = ()
        for tokens in sorted(ends):
            shared = _common(last, tokens)
            del path[shared:]
            for token in tokens[shared:]:
                self.parents.append(path[-1] if path else -1)
                path.append(len(self.tokens))
                self.tokens.append(token)
            self._end(path[-1], len(tokens), ends[tokens])
            last = tokens

    def _end(self, row: int, depth: int, items: Sequence[tuple[int, Branch]]) -> None:
        """The row at the end of a filled template: its columns, and the lead-ins of its options below it."""
        trie = self.builder.option_trie(tuple(dict.fromkeys(branch.reading for _, branch in items)))
        base = len(self.tokens) - 1
        self.tokens += trie.tokens
        self.parents += [row if parent == 0 else base + parent for parent in trie.parents]
        self.rows.append(row)
        self.rows += range(base + 1, base + 1 + len(trie.tokens))
        self.counts += trie.counts
        self.cols.append(trie.cols)
        for number, branch in items:
            self.starts[number] = self.width
            self.gathers[number] = self.builder.gather_id(trie.gathers[branch.reading])
        self.width += len(trie.cols)
        self.depth = max(self.depth, depth + trie.depth)

    def forest(self) -> Forest:
        return Forest(
            tokens=np.array(self.tokens, np.int32),
            parents=np.array(self.parents, np.int32),
            rows=np.array(self.rows, np.int32),
            counts=np.array(self.counts, np.int32),
            cols=np.concatenate(self.cols) if self.cols else np.empty(0, np.int32),
            starts=np.array(self.starts, np.int64),
            gathers=np.array(self.gathers, np.int32),
            depth=self.depth,
        )


def _common(a: Tokens, b: Tokens) -> int:
    """How many tokens two paths share from the start."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            return n
        n += 1
    return n
