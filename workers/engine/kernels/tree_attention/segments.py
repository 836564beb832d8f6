"""The trees of a pass as segments of K/V rows. No torch."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]

Piece = tuple[int, int, int]
"""(source, first row, rows): consecutive path positions in consecutive rows. Source 0: the pass, s > 0: store s - 1."""

Path = tuple[Piece, ...]
"""Pieces in path order, from position 0 on."""


@dataclass(frozen=True, slots=True)
class Segments:
    """Unbranched runs of the pass's trees, [S] int64 each; a parent stands before its children.

    sources  0: rows of this pass, which are queries too; s > 0: rows of store s - 1, keys and values only
    starts   first row in the source
    lengths  rows, at least 1
    parents  the segment at whose end this one continues, -1 at the root of a tree (position 0)
    content  bool: whether the segment lies in the tree's content chain. None: stores and roots do
    by_position  bool, the same for all of a tree: its paths are summed by position alone on a GPU too. None: none are
    """

    sources: I64
    starts: I64
    lengths: I64
    parents: I64
    content: npt.NDArray[np.bool_] | None = None
    by_position: npt.NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(self.sources)

    @property
    def in_content(self) -> npt.NDArray[np.bool_]:
        """`content`, with its default."""
        return (self.sources > 0) | (self.parents < 0) if self.content is None else self.content


def extend(path: Path, piece: Piece) -> Path:
    """The path with one more piece, joined to the last one where the rows continue."""
    if path:
        source, start, rows = path[-1]
        if source == piece[0] and start + rows == piece[1]:
            return (*path[:-1], (source, start, rows + piece[2]))
    return (*path, piece)


def cut(path: Path, first: int, last: int) -> Path:
    """The pieces of path positions first ≤ p < last."""
    out: list[Piece] = []
    position = 0
    for source, start, rows in path:
        low, high = max(first - position, 0), min(last - position, rows)
        if low < high:
            out.append((source, start + low, high - low))
        position += rows
    return tuple(out)


@dataclass(frozen=True, slots=True)
class Chain:
    """Consecutive query rows of the pass on one path: start ≤ row < start + rows, at positions from `position` on."""

    start: int
    rows: int
    position: int
    path: Path  # up to and including the chain's own rows


def chains(segments: Segments) -> list[Chain]:
    """The query rows as chains: a segment and the one that continues it in the next row are one chain."""
    ends: list[Path] = []  # path to the end of each segment
    depths: list[int] = []
    chain_of: list[int] = []  # the chain that ends with the segment, -1 for stores
    out: list[Chain] = []
    rows = zip(
        *(a.tolist() for a in (segments.sources, segments.starts, segments.lengths, segments.parents)), strict=True
    )
    for source, start, length, parent in rows:
        path = extend(ends[parent] if parent >= 0 else (), (source, start, length))
        position = depths[parent] if parent >= 0 else 0
        ends.append(path)
        depths.append(position + length)
        chain = chain_of[parent] if parent >= 0 else -1
        if source != 0:
            chain_of.append(-1)
        elif chain >= 0 and out[chain].start + out[chain].rows == start:
            before = out[chain]
            out[chain] = Chain(before.start, before.rows + length, before.position, path)
            chain_of[parent] = -1
            chain_of.append(chain)
        else:
            chain_of.append(len(out))
            out.append(Chain(start, length, position, path))
    return out
