"""The work list of the attention kernel: which rows make a query tile, and which keys each tile reads in which order.

No torch. A row's keys are reduced in an order that its own path sets: first the content's positions in blocks of BN,
then its branch in spans of `SPAN` positions counted from where the branch leaves the content, span by span. A tile
holds consecutive rows of one tree, so all share the content. The spans of a tile's rows stand side by side in key tiles
of BN / SPAN slots, only spans of one depth in one key tile: a row sees one slot of it at most, and what it does not see
weighs exactly nothing, so neither the slot nor the company of other branches touches its bits.

That is made for many short branches. Rows further than `DEEP` down a branch, and all rows of trees that ask for it, are
`by_position`: they are no part of this list but of `path_blocks`, whose work grows with the length of a path alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from workers.engine.kernels.tree_attention.segments import I64, Segments

I32 = npt.NDArray[np.int32]
I8 = npt.NDArray[np.int8]
Flags = npt.NDArray[np.bool_]

SPAN = 16
"""Branch positions that are reduced together: one step of the matrix units. Part of the bits."""

DEEP = 512
"""Branch positions from here on are reduced by path position (`path_blocks`). A multiple of SPAN; part of the bits."""

TILE_FIELDS = 4
RANGE_FIELDS = 3


@dataclass(frozen=True, slots=True)
class TilePlan:
    """Q query tiles of up to TM rows, X key tiles of branch spans, T rows, padding at the end. Every row that is not
    by position, padding too, lies in one query tile.

    tiles    [Q, 4] first row, rows, first and last + 1 of its key tiles
    ranges   window → [Q, 3] content positions in blocks of BN: first and last + 1 seen by any row; key row of content
             position 0 (may be negative: what lies before the first block is not stored)
    keys     [X, BN] key rows; where a slot has no token, the row of another token of the same tree
    depths   [X] branch offset of the spans' first position
    slots    [X, TM] the slot that a row of the query tile sees, -1: none
    limits, positions, offsets  [T] content positions that a row sees (from 0 on), path position, position in the branch
             (-1: a content row, or padding, which sees nothing)
    """

    tiles: I32
    ranges: dict[int | None, I32]
    keys: I32
    depths: I32
    slots: I8
    limits: I32
    positions: I32
    offsets: I32


@dataclass(frozen=True, slots=True)
class Rows:
    """Facts of every row [T]: tree, key row of content position 0, limit, position, offset, parent row in the branch
    (-1: the row hangs on the content, or is content), whether it is reduced by position. Padding is a tree of its own,
    without content or branches."""

    trees: I64
    bases: I64
    limits: I64
    positions: I64
    offsets: I64
    parents: I64
    by_position: Flags


def _rows(segments: Segments, total: int, store_rows: Sequence[int]) -> Rows:
    """The segments' rows and padding up to `total`. Key row of row i of store s is store_rows[s - 1] + i."""
    count = len(segments)
    depth, hang, tree, base, parent_row = ([0] * count for _ in range(5))
    content = segments.in_content.tolist()
    sources, starts, lengths, parents = (
        a.tolist() for a in (segments.sources, segments.starts, segments.lengths, segments.parents)
    )
    for s in range(count):
        parent = parents[s]
        if parent < 0:
            tree[s] = s
            base[s] = starts[s] + (store_rows[sources[s] - 1] if sources[s] else 0)
            hang[s], parent_row[s] = 0, -1
            continue
        depth[s] = depth[parent] + lengths[parent]
        tree[s], base[s] = tree[parent], base[parent]
        hang[s] = depth[s] if content[parent] else hang[parent]
        parent_row[s] = -1 if content[parent] else starts[parent] + lengths[parent] - 1
    whole = np.zeros(count, dtype=bool) if segments.by_position is None else segments.by_position
    of_segments = (np.array(a, dtype=np.int64) for a in (depth, hang, tree, base, parent_row))
    return _padded(_expand(segments, np.array(content), whole, *of_segments), total)


def _padded(rows: Rows, total: int) -> Rows:
    """The same with padding behind them."""

    def longer(values: I64, value: int) -> I64:
        return np.pad(values, (0, total - len(values)), constant_values=value)

    return Rows(
        trees=longer(rows.trees, -1),
        bases=longer(rows.bases, 0),
        limits=longer(rows.limits, 0),
        positions=longer(rows.positions, 0),
        offsets=longer(rows.offsets, -1),
        parents=longer(rows.parents, -1),
        by_position=np.pad(rows.by_position, (0, total - len(rows.by_position))),
    )


def _expand(
    segments: Segments, content: Flags, whole: Flags, depth: I64, hang: I64, tree: I64, base: I64, parent_row: I64
) -> Rows:
    """Facts of the pass's segments → facts of their rows, in the order of the rows. whole: all rows are by position."""
    own = np.flatnonzero(segments.sources == 0)
    order = own[np.argsort(segments.starts[own], kind="stable")]
    lengths = segments.lengths[order]
    of = np.repeat(order, lengths)
    step = np.arange(len(of)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    positions = depth[of] + step
    is_content = content[of]
    parents = np.where(step > 0, np.arange(len(of)) - 1, parent_row[of])
    offsets = np.where(is_content, -1, positions - hang[of])
    return Rows(
        trees=tree[of],
        bases=base[of],
        limits=np.where(is_content, positions + 1, hang[of]),
        positions=positions,
        offsets=offsets,
        parents=np.where(is_content, -1, parents),
        by_position=whole[of] | (offsets >= DEEP),
    )


def _spans(rows: Rows) -> tuple[I64, I64]:
    """(end [T], keys [T, SPAN]): the last row of the span that row r stands in, and for such a row e its span's rows.

    A span ends at its last position or at a leaf, and each of its rows belongs to the end below its first child; in
    depth-first order that is the next end. Rows of keys for others than ends, and absent positions, are -1, as is all
    that is by position.
    """
    total = len(rows.offsets)
    index = np.arange(total)
    has_child = np.zeros(total, dtype=bool)
    has_child[:-1] = rows.parents[1:] == index[:-1]
    branch = (rows.offsets >= 0) & ~rows.by_position
    ends = np.flatnonzero(branch & ((rows.offsets % SPAN == SPAN - 1) | ~has_child))
    end = np.full(total, -1, dtype=np.int64)
    end[branch] = ends[np.searchsorted(ends, index[branch])]
    keys = np.full((total, SPAN), -1, dtype=np.int64)
    at, who = ends.copy(), ends
    for _ in range(SPAN):
        keys[who, rows.offsets[at] % SPAN] = at
        going = rows.offsets[at] % SPAN > 0
        at, who = rows.parents[at[going]], who[going]
    return end, keys


def _seen(rows: Rows, end: I64, keys: I64) -> tuple[I64, I64, I64]:
    """Every (row, depth, span) that is seen: a row sees its own span and those above it up to the content."""
    row = np.flatnonzero(end >= 0)
    span = end[row]
    depth = rows.offsets[row] // SPAN
    found = [(row, depth, span)]
    while len(row):
        going = depth > 0
        row, depth = row[going], depth[going] - 1
        top = keys[span[going], 0]
        span = rows.parents[top]  # the last row of the span above
        found.append((row, depth, span))
    rows_, depths, spans = (np.concatenate(part) for part in zip(*found, strict=True))
    return rows_, depths, spans


@dataclass(frozen=True, slots=True)
class Paths:
    """What of a pass does not depend on the layout of heads: its rows, spans, and which rows see which.

    keys                         [T, SPAN] the rows of the span that ends in row t, -1 where there are none
    seen_by, seen_depths, seen   [S] row, depth of a span above or at it, last row of that span
    """

    rows: Rows
    keys: I64
    seen_by: I64
    seen_depths: I64
    seen: I64


def paths(segments: Segments, total: int, store_rows: Sequence[int] = ()) -> Paths:
    """The paths of a pass of `total` rows, padding included.

    store_rows: per store the key row where its rows begin, behind those of the pass.
    """
    rows = _rows(segments, total, store_rows)
    end, keys = _spans(rows)
    return Paths(rows, keys, *_seen(rows, end, keys))


def tile_starts(runs: I64, tile_rows: int, wanted: Flags) -> tuple[I64, I64]:
    """(first row [Q], rows [Q]) of the query tiles: runs of one number [T], where wanted [T], cut at `tile_rows`."""
    changes = np.flatnonzero(runs[1:] != runs[:-1]) + 1
    first = np.concatenate((np.zeros(min(1, len(runs)), dtype=np.int64), changes))
    sizes = np.diff(np.append(first, len(runs)))
    first, sizes = first[wanted[first]], sizes[wanted[first]]
    counts = -(-sizes // tile_rows)
    step = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(first, counts) + step * tile_rows
    return starts, np.minimum(tile_rows, np.repeat(first + sizes, counts) - starts)


def _over_tiles(reduce: np.ufunc, values: I64, starts: I64, counts: I64) -> I64:
    """`reduce` over the rows of each tile [Q]."""
    bounds = np.stack((starts, starts + counts), axis=1).reshape(-1)
    reduced: I64 = reduce.reduceat(np.append(values, 0), bounds)[::2] if len(starts) else starts
    return reduced


def _ranges(rows: Rows, starts: I64, counts: I64, block: int, window: int | None) -> I32:
    """[Q, 3] of one window; see `TilePlan`."""
    last = -(-_over_tiles(np.maximum, rows.limits, starts, counts) // block)
    first = np.zeros_like(starts)
    if window is not None:
        first = np.maximum(0, _over_tiles(np.minimum, rows.positions, starts, counts) - window + 1) // block
    return np.stack((np.minimum(first, last), last, rows.bases[starts]), axis=1).astype(np.int32)


def _key_tiles(
    found: Paths, starts: I64, tile_rows: int, slots_per_tile: int
) -> tuple[I64, npt.NDArray[np.int64], I64, I8]:
    """(first key tile of each query tile [Q + 1], keys, depths, slots); see `TilePlan`."""
    row, depth, span = found.seen_by, found.seen_depths, found.seen
    tile = np.searchsorted(starts, row, side="right") - 1
    total, deepest = len(found.rows.offsets) + 1, int(depth.max(initial=0)) + 1
    key = (tile * deepest + depth) * total + span
    unique, inverse = np.unique(key, return_inverse=True)
    level = unique // total  # (tile, depth) as one number
    new_level = np.concatenate(([True], level[1:] != level[:-1])) if len(level) else np.zeros(0, dtype=bool)
    first_of_level = np.maximum.accumulate(np.where(new_level, np.arange(len(level)), 0))
    rank = np.arange(len(level)) - first_of_level
    slot = rank % slots_per_tile
    key_tile = np.cumsum(slot == 0) - 1
    count = int(key_tile[-1]) + 1 if len(key_tile) else 0
    heads = np.flatnonzero(slot == 0)
    out_keys = np.full((count, slots_per_tile, SPAN), -1, dtype=np.int64)
    out_keys[key_tile, slot] = found.keys[unique % total]
    slots = np.full((count, tile_rows), -1, dtype=np.int8)
    slots[key_tile[inverse], row - starts[tile]] = slot[inverse]
    offsets = np.searchsorted(level[heads] // deepest, np.arange(len(starts) + 1))
    return offsets, out_keys.reshape(count, slots_per_tile * SPAN), level[heads] % deepest * SPAN, slots


def plan_tiles(found: Paths, *, tile_rows: int, block: int, windows: Sequence[int | None]) -> TilePlan:
    """The work list of a pass.

    tile_rows   query rows of a tile (TM)
    block       keys of a tile (BN), a multiple of SPAN
    windows     the distinct windows of the layers (None: full)
    """
    rows = found.rows
    starts, counts = tile_starts(2 * rows.trees + rows.by_position, tile_rows, ~rows.by_position)
    offsets, keys, depths, slots = _key_tiles(found, starts, tile_rows, block // SPAN)
    return TilePlan(
        tiles=np.stack((starts, counts, offsets[:-1], offsets[1:]), axis=1).astype(np.int32),
        ranges={window: _ranges(rows, starts, counts, block, window) for window in set(windows)},
        keys=np.where(keys < 0, keys[:, :1], keys).astype(np.int32),
        depths=depths.astype(np.int32),
        slots=slots,
        limits=rows.limits.astype(np.int32),
        positions=rows.positions.astype(np.int32),
        offsets=rows.offsets.astype(np.int32),
    )
