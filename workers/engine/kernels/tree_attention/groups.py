"""Which query rows run together: groups of short row runs ("slots") that share their path up to a block boundary.

No torch. A group's keys are the shared blocks, read in place by one product for all its rows, and per slot a tail: the
blocks that hold the slot's own rows, gathered. Grouping changes which products compute a row, never their order of
summation.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

import numpy as np

from workers.engine.kernels.tree_attention.segments import I64, Chain, Path, Segments, chains, cut

BLOCK = 64
"""Path positions in one attention block (B). Part of the bits: it is named in the fingerprint."""

_LONG = 32  # a chain with more rows is cut at block boundaries: each piece then shares all the blocks before it
_ENOUGH = 8  # slots that must share a boundary for a group of their own
_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # of short slots, in quanta: up to a third of a slot is padding
_MAX_SCORES = 1 << 21  # scores of one group and key/value head, 8 MiB


@dataclass(frozen=True, slots=True)
class Group:
    """slots of R query rows each, short ones filled up with their own first row.

    rows        [C, R] rows of the pass
    positions   [C, R] their path positions
    shared      runs of whole blocks from block 0 on, each a path that makes up its keys
    tails       per slot the pieces of its tail, from block `first_tail` on
    tail_blocks how many blocks the longest tail touches
    """

    rows: I64
    positions: I64
    shared: tuple[Path, ...]
    tails: tuple[Path, ...]
    first_tail: int
    tail_blocks: int


def _slots(segments: Segments) -> Iterator[Chain]:
    """The chains, long ones cut at block boundaries."""
    for chain in chains(segments):
        end = chain.position + chain.rows
        if chain.rows <= _LONG:
            yield chain
            continue
        first = chain.position
        while first < end:
            last = min(end, (first // BLOCK + 1) * BLOCK)
            yield Chain(chain.start + first - chain.position, last - first, first, cut(chain.path, 0, last))
            first = last


def _boundaries(slot: Chain) -> list[tuple[int, int]]:
    """For each block boundary up to the slot's first block: the (source, row) before it, which names all before it."""
    out: list[tuple[int, int]] = []
    position, wanted = 0, BLOCK
    last = slot.position // BLOCK * BLOCK
    for source, start, rows in slot.path:
        while wanted <= last and wanted <= position + rows:
            out.append((source, start + wanted - position - 1))
            wanted += BLOCK
        position += rows
    return out


def _shared_blocks(slots: list[Chain]) -> list[tuple[int, tuple[int, int] | None]]:
    """Per slot: how many blocks it takes from its group, and the boundary that names them.

    A long slot takes all it can. A short one takes the deepest boundary that enough short slots share, so that few rows
    far down a common question neither gather that question each nor make a group each.
    """
    boundaries = [_boundaries(slot) for slot in slots]
    counts = Counter(b for slot, bs in zip(slots, boundaries, strict=True) if slot.rows <= _LONG for b in bs)
    out: list[tuple[int, tuple[int, int] | None]] = []
    for slot, bs in zip(slots, boundaries, strict=True):
        depth = len(bs)
        if slot.rows <= _LONG and bs:
            enough = min(_ENOUGH, counts[bs[0]])
            while counts[bs[depth - 1]] < enough:
                depth -= 1
        out.append((depth, bs[depth - 1] if depth else None))
    return out


def _runs(path: Path, blocks: int) -> tuple[Path, ...]:
    """The first `blocks` blocks as runs: whole blocks inside one piece together, a block over several pieces alone."""
    out: list[Path] = []
    block = 0
    while block < blocks:
        pieces = cut(path, block * BLOCK, blocks * BLOCK)
        whole = max(1, pieces[0][2] // BLOCK)
        out.append(cut(pieces, 0, whole * BLOCK))
        block += whole
    return tuple(out)


def _padded_rows(rows: int, group: int, multiple: int) -> int:
    """Rows of a slot so that rows · G is a multiple of `multiple`; short slots in few sizes, so that many share one."""
    quantum = multiple // gcd(multiple, group)
    needed = -(-rows // quantum)
    if rows > _LONG:
        return needed * quantum
    return next(n for n in _SIZES if n >= needed) * quantum


def _group(slots: list[Chain], rows: int, shared: int, tail_blocks: int) -> Group:
    """The group of these slots, filled up to `rows` rows each."""
    offsets = np.arange(rows)
    counts = np.array([slot.rows for slot in slots])
    offset = np.where(offsets < counts[:, None], offsets, 0)
    starts = np.array([slot.start for slot in slots])
    firsts = np.array([slot.position for slot in slots])
    return Group(
        rows=starts[:, None] + offset,
        positions=firsts[:, None] + offset,
        shared=_runs(slots[0].path, shared),
        tails=tuple(cut(slot.path, shared * BLOCK, slot.position + slot.rows) for slot in slots),
        first_tail=shared,
        tail_blocks=tail_blocks,
    )


def groups(segments: Segments, *, group: int, multiple: int) -> list[Group]:
    """All query rows of the pass, each in one group. `group` = G, `multiple` = the row rule's step."""
    slots = list(_slots(segments))
    together: dict[tuple[int, int, int, tuple[int, int] | None], list[Chain]] = defaultdict(list)
    for slot, (shared, name) in zip(slots, _shared_blocks(slots), strict=True):
        tail_blocks = (slot.position + slot.rows - 1) // BLOCK + 1 - shared
        together[(_padded_rows(slot.rows, group, multiple), tail_blocks, shared, name)].append(slot)
    out: list[Group] = []
    for (rows, tail_blocks, shared, _), members in together.items():
        size = max(1, _MAX_SCORES // (rows * group * (shared + tail_blocks) * BLOCK))
        out += [_group(members[i : i + size], rows, shared, tail_blocks) for i in range(0, len(members), size)]
    return out
