"""The work list for rows that are reduced by path position alone: a block table for each chain of rows. No torch.

A row's keys are reduced in blocks of BN path positions, counted from the start of its path, whatever of the path is
content. A query tile holds rows of one chain, so that all share one path. The table says where the path's blocks lie:
in consecutive rows, or, where a fork falls inside a block, in rows that are named one by one. A chain takes over the
entries of the chain that it hangs on; what a pass needs grows with the lengths of paths over BN, not with the square.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from workers.engine.kernels.tree_attention.segments import I64
from workers.engine.kernels.tree_attention.tiles import I32, Rows, tile_starts

TILE_FIELDS = 5
_CONTENT_ALONE = 1 << 30  # more blocks than a content has


@dataclass(frozen=True, slots=True)
class PathPlan:
    """Q query tiles of up to TM rows, X entries of the table, Y blocks that are named row by row.

    tiles   [Q, 5] first row; rows; blocks of content before the table; key row of content position 0; where block 0
            would stand in the table (may be negative)
    firsts  window → [Q] the first block that any row sees
    table   [X] key row of the block's first position, or -1 - y
    keys    [Y, BN] key rows; behind the end of a chain its last row
    """

    tiles: I32
    firsts: dict[int | None, I32]
    table: I32
    keys: I32


class _Tables:
    """Entries and blocks as they come, chain by chain, a chain's parent before it."""

    def __init__(self, block: int) -> None:
        self.block = block
        self.entries: list[int] = []
        self.keys: list[list[int]] = []

    def rows_of(self, entry: int, count: int) -> list[int]:
        """The first rows of a block."""
        return self.keys[-1 - entry][:count] if entry < 0 else list(range(entry, entry + count))

    def add(self, row: int, count: int, position: int, base: int, skipped: int, above: int | None) -> int:
        """A chain of `count` rows from `row` on, the first at `position`; returns where its block 0 would stand.

        base     key row of content position 0
        skipped  blocks of the content that have no entries
        above    what was returned for the chain that this one hangs on; None: the content
        """
        block, begins = self.block, position // self.block
        at = len(self.entries) - skipped
        if above is not None:
            self.entries += self.entries[above + skipped : above + begins]
        following = begins * block
        if position % block:
            entry = base + following if above is None else self.entries[above + begins]
            own = range(row, row + min(count, following + block - position))
            rows = [*self.rows_of(entry, position - following), *own]
            self.entries.append(-1 - len(self.keys))
            self.keys.append(rows + rows[-1:] * (block - len(rows)))
            following += block
        self.entries += range(row + following - position, row + count, block)
        return at


def plan_paths(rows: Rows, *, tile_rows: int, block: int, windows: Sequence[int | None]) -> PathPlan | None:
    """The work list of a pass; None where no row is by position. Arguments as of `tiles.plan_tiles`."""
    if not rows.by_position.any():
        return None
    index = np.arange(len(rows.trees))
    same_tree = np.append(False, rows.trees[1:] == rows.trees[:-1])
    is_content = rows.offsets < 0
    goes_on = same_tree & np.where(is_content, np.append(False, is_content[:-1]), rows.parents == index - 1)
    chain = np.cumsum(~goes_on) - 1
    heads = np.flatnonzero(~goes_on)
    skipped, begins, table, keys = _tables(rows, chain, heads, block)

    starts, counts = tile_starts(2 * chain + rows.by_position, tile_rows, rows.by_position)
    of = chain[starts]
    tiles = np.stack((starts, counts, skipped[of], rows.bases[starts], begins[of]), axis=1).astype(np.int32)
    seen_from = {w: np.zeros_like(starts) if w is None else rows.positions[starts] - w + 1 for w in set(windows)}
    firsts = {window: (np.maximum(0, first) // block).astype(np.int32) for window, first in seen_from.items()}
    return PathPlan(tiles, firsts, table, keys)


def _tables(rows: Rows, chain: I64, heads: I64, block: int) -> tuple[I64, I64, I32, I32]:
    """(skipped [chains], where block 0 would stand [chains], table, keys) of the trees that have rows by position."""
    tables, of_interest = _Tables(block), set(np.unique(rows.trees[rows.by_position]).tolist())
    skipped = np.full(len(heads), _CONTENT_ALONE, dtype=np.int64)
    begins = np.zeros(len(heads), dtype=np.int64)
    ends = np.append(heads[1:], len(chain))
    facts = (
        a[heads].tolist() for a in (rows.trees, rows.offsets, rows.parents, rows.positions, rows.bases, rows.limits)
    )
    for number, (row, end, tree, offset, parent, position, base, limit) in enumerate(
        zip(heads.tolist(), ends.tolist(), *facts, strict=True)
    ):
        if offset < 0 or tree not in of_interest:
            continue
        skipped[number] = limit // block
        above = int(begins[chain[parent]]) if parent >= 0 else None
        begins[number] = tables.add(row, end - row, position, base, limit // block, above)
    keys = np.array(tables.keys, dtype=np.int32).reshape(-1, block)
    return skipped, begins, np.array(tables.entries, dtype=np.int32), keys
