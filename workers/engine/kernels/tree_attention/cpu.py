"""Tree attention with library products: big ones over the shared blocks, batched ones over the gathered tails.

Per group of rows and key/value head: scores of all visible path blocks in one buffer whose column is the path position,
one softmax whose sums are taken block by block, and one product per block added in path order. A masked or absent
position has the weight 0 exactly, and adding zeros changes no bits; absent positions point at zero rows, never at
another request's.

A group and head are computed by one thread, see `kernels.pieces`: most of their steps are too short to be split.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from workers.engine.kernels.pieces import each
from workers.engine.kernels.products import RowRule, batch_product, batch_product_add, product_into
from workers.engine.kernels.tree_attention.groups import BLOCK, Group, groups
from workers.engine.kernels.tree_attention.segments import Path, Segments

Patch = tuple[int, int, int, int, int]
"""(slot or -1 for all, first tail column, source, first row, rows): tail keys that lie in a store."""


@dataclass(frozen=True, slots=True)
class Visible:
    """What one window lets a group see.

    first_block  the first shared block that any row sees
    shared_mask  [C, R, 1, columns] bool, True where a row does not see the leading shared columns; None: sees all
    tail_mask    [C, R, 1, tail columns] bool, True where a row does not see the tail column
    """

    first_block: int
    shared_mask: Tensor | None
    tail_mask: Tensor


@dataclass(frozen=True, slots=True)
class StagedGroup:
    """A group with its index tensors."""

    rows: Tensor  # [C·R] int64
    slots: int
    shared: tuple[Path, ...]
    first_tail: int
    tail_blocks: int
    tail_index: Tensor  # [C · tail columns] int64, rows of the pass; T (the zero row) where the position is elsewhere
    patches: tuple[Patch, ...]
    visible: dict[int | None, Visible]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What the layers of one pass share."""

    groups: tuple[StagedGroup, ...]
    extra_rows: int = 0
    """Key rows behind the pass's: none, stores are read in place."""


def _hidden(positions: Tensor, columns: Tensor, window: int | None) -> Tensor:
    """positions [C, R], columns' path positions → [C, R, 1, columns], True where the row does not see the column."""
    p, c = positions[:, :, None, None], columns[None, None, None, :]
    hidden = c > p
    return hidden if window is None else hidden | (c <= p - window)


def _visible(group: Group, positions: Tensor, window: int | None) -> Visible:
    tail_start = group.first_tail * BLOCK
    tail = torch.arange(tail_start, tail_start + group.tail_blocks * BLOCK)
    if window is None:
        return Visible(0, None, _hidden(positions, tail, None))
    first = min(max(0, int(positions.min()) - window + 1) // BLOCK, group.first_tail)
    blind_end = min(int(positions.max()) - window + 1, tail_start)  # columns below it are hidden from some row
    shared = torch.arange(first * BLOCK, max(blind_end, first * BLOCK))
    mask = _hidden(positions, shared, window) if len(shared) else None
    return Visible(first, mask, _hidden(positions, tail, window))


def _stage(group: Group, windows: Sequence[int | None], zero_row: int) -> StagedGroup:
    slots, columns = len(group.tails), group.tail_blocks * BLOCK
    index = np.full((slots, columns), zero_row, dtype=np.int64)
    patches: list[Patch] = []
    for i, tail in enumerate(group.tails):
        column = 0
        for source, start, rows in tail:
            if source == 0:
                index[i, column : column + rows] = np.arange(start, start + rows)
            else:
                patches.append((i, column, source, start, rows))
            column += rows
    common = {patch[1:] for patch in patches}
    if len(common) == 1 and len(patches) == slots:
        patches = [(-1, *patches[0][1:])]
    positions = torch.from_numpy(group.positions)
    return StagedGroup(
        rows=torch.from_numpy(group.rows).reshape(-1),
        slots=slots,
        shared=group.shared,
        first_tail=group.first_tail,
        tail_blocks=group.tail_blocks,
        tail_index=torch.from_numpy(index).reshape(-1),
        patches=tuple(patches),
        visible={window: _visible(group, positions, window) for window in set(windows)},
    )


def prepare(
    segments: Segments, *, rows: int, group: int, windows: Sequence[int | None], rule: RowRule
) -> AttentionPlan:
    """The op's plan for a pass of `rows` rows (T)."""
    found = groups(segments, group=group, multiple=rule.fixed or rule.multiple)
    return AttentionPlan(tuple(_stage(g, windows, rows) for g in found))


def _read(sources: Sequence[Tensor], path: Path) -> Tensor:
    """The rows of a path [rows, D]: a view where it is one piece."""
    parts = [sources[source][start : start + rows] for source, start, rows in path]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _shared_runs(group: StagedGroup, first_block: int) -> list[tuple[int, Path]]:
    """The visible runs: (first column, path), columns counted from `first_block` on."""
    out: list[tuple[int, Path]] = []
    block = 0
    for path in group.shared:
        blocks = sum(rows for _, _, rows in path) // BLOCK
        skip = max(0, min(blocks, first_block - block))
        if skip < blocks:
            kept = path if not skip else ((path[0][0], path[0][1] + skip * BLOCK, path[0][2] - skip * BLOCK),)
            out.append(((block + skip - first_block) * BLOCK, kept))
        block += blocks
    return out


def _tail(sources: Sequence[Tensor], group: StagedGroup) -> Tensor:
    """The tail rows [C, tail columns, D], zero where a slot has no token."""
    tail = sources[0].index_select(0, group.tail_index).view(group.slots, -1, sources[0].shape[1])
    for slot, column, source, start, rows in group.patches:
        where = slice(None) if slot < 0 else slot
        tail[where, column : column + rows] = sources[source][start : start + rows]
    return tail


def _softmax(scores: Tensor) -> Tensor:
    """scores [M, columns] → exp(scores - largest) in place; returns the row sums [M, 1], added block by block."""
    scores.sub_(scores.amax(dim=1, keepdim=True)).exp_()
    blocks = scores.view(scores.shape[0], -1, BLOCK).sum(dim=2)
    total = blocks[:, 0].clone()
    for i in range(1, blocks.shape[1]):
        total.add_(blocks[:, i])
    return total[:, None]


def _mask(scores: Tensor, visible: Visible, shared_columns: int) -> None:
    """scores [C, R, G, columns]: -∞ where a row does not see the column."""
    if visible.shared_mask is not None:
        scores[..., : visible.shared_mask.shape[-1]].masked_fill_(visible.shared_mask, float("-inf"))
    scores[..., shared_columns:].masked_fill_(visible.tail_mask, float("-inf"))


def _attend(
    q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], group: StagedGroup, visible: Visible, rule: RowRule
) -> Tensor:
    """One group and key/value head: q [C·R, G·D] → [C·R, G·D]. keys, values: the pass's, then the stores', [·, D]."""
    d = keys[0].shape[1]
    q = q.reshape(-1, d)
    m = q.shape[0]
    runs = _shared_runs(group, visible.first_block)
    shared = (group.first_tail - visible.first_block) * BLOCK
    scores = q.new_empty(m, shared + group.tail_blocks * BLOCK)
    per_slot = scores.view(group.slots, m // group.slots, -1)
    for column, path in runs:
        k = _read(keys, path)
        product_into(scores[:, column : column + k.shape[0]], q, k.t(), rule)
    tail_k = _tail(keys, group)
    per_slot[:, :, shared:] = batch_product(q.view(group.slots, -1, d), tail_k.transpose(1, 2), rule)
    _mask(scores.view(group.slots, group.rows.shape[0] // group.slots, -1, scores.shape[1]), visible, shared)
    total = _softmax(scores)
    out = q.new_zeros(m, d)
    for column, path in runs:
        v = _read(values, path)
        for i in range(0, v.shape[0], BLOCK):
            product_into(out, scores[:, column + i : column + i + BLOCK], v[i : i + BLOCK], rule, add=True)
    tail_v = _tail(values, group)
    out_slots = out.view(group.slots, -1, d)
    for i in range(0, tail_v.shape[1], BLOCK):
        batch_product_add(out_slots, per_slot[:, :, shared + i : shared + i + BLOCK], tail_v[:, i : i + BLOCK], rule)
    return out.div_(total).view(group.rows.shape[0], -1)


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    stores: Sequence[tuple[Tensor, Tensor]],
    plan: AttentionPlan,
    *,
    window: int | None,
    rule: RowRule,
) -> Tensor:
    """The op of `kernels.tree_attention`: [T, H·D]."""
    n, t, g, d = q.shape
    dtype = q.dtype
    q, k, v = q.float(), k.float(), v.float()
    stores = [(kept_k.float(), kept_v.float()) for kept_k, kept_v in stores]
    out = q.new_zeros(t, n * g * d)

    def work(piece: tuple[int, StagedGroup]) -> None:
        head, group = piece
        keys = [k[head], *(store[0][head] for store in stores)]
        values = [v[head], *(store[1][head] for store in stores)]
        rows = q[head].view(t, g * d).index_select(0, group.rows)
        attended = _attend(rows, keys, values, group, group.visible[window], rule)
        out[:, head * g * d : (head + 1) * g * d].index_copy_(0, group.rows, attended)

    each(work, ((head, group) for head in range(n) for group in plan.groups))
    return out.to(dtype)
