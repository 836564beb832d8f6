"""Tree attention in Triton: one program for a query tile (rows of one tree times the G query heads) and a kv head.

An online softmax in float32 over the tile's keys in the order of `tiles`: content blocks, then key tiles of branch
spans. Keys that a row does not see weigh exactly nothing and leave its maximum, sum and result as they are, so a row's
bits depend on its own path alone: not on the tile it stands in, not on the slot that its span has, not on the pass.
What that rests on, and the tests measure: the matrix units add a step's 16 products in an order that has nothing to do
with the row or with other steps, and a sum over a row's columns takes the same tree for every row and slot.

Rows that are reduced by position alone are another kernel's, `path_kernel`: each row is always the same one's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

from workers.engine.kernels.encode.kernel import as_activation, empty_rows, encode
from workers.engine.kernels.encoding import Activation, Encoding
from workers.engine.kernels.launch import launch, next_power_of_2
from workers.engine.kernels.tree_attention.online_softmax import softmax_step, store_result
from workers.engine.kernels.tree_attention.path_blocks import TILE_FIELDS as PATH_FIELDS
from workers.engine.kernels.tree_attention.path_blocks import plan_paths
from workers.engine.kernels.tree_attention.path_kernel import path_attention_kernel
from workers.engine.kernels.tree_attention.segments import Segments
from workers.engine.kernels.tree_attention.tiles import RANGE_FIELDS, SPAN, TILE_FIELDS, paths, plan_tiles
from workers.engine.staging import DeviceBuffer, HostBuffer, Slot

_LOG2_E = 1.4426950408889634
_EVERYTHING = 1 << 30  # a window that no position reaches
_APART = 1 << 24  # between the offsets of neighbouring slots: more than a branch has positions


@dataclass(frozen=True, slots=True)
class TileShape:
    """Query rows times heads (BM), keys (BN), columns of the result (BV), warps and pipeline stages of a program.

    BN is part of the bits, the rest is not.
    """

    block_m: int
    block_n: int
    block_v: int
    num_warps: int
    num_stages: int

    def tile_rows(self, group: int) -> int:
        """Rows of the pass in a query tile (TM)."""
        return self.block_m // group


def tile_shape(head_dim: int, group: int) -> TileShape:
    """The tile of a head dimension: the accumulator [BM, D] must fit the registers, the keys the shared memory.

    ValueError for heads that no tile is made for.
    """
    if group > 64:
        raise ValueError(f"{group} query heads on one key/value head: at most 64 are supported")
    if head_dim > 512:
        raise ValueError(f"heads of size {head_dim}: at most 512 is supported")
    # Above 256 columns two programs share a result, and both compute the weights: one of so few rows would do it twice
    # as well, once for each half of its warps.
    if head_dim > 256:
        return TileShape(128, 32, 256, 8, 2)
    if head_dim > 128:
        return TileShape(64, 32, 256, 4, 2)
    return TileShape(128, 64, 128, 8, 3)


@triton.jit
def _key_rows(step, blocks, block_first, base, final, p_keys, count, o_n, BN: tl.constexpr):
    """Rows [BN] of k and v that key tile `step` of the query tile reads: content first, then spans.

    No row beyond the content position `final` is read: it would be another tree's.
    """
    span = step - blocks
    of_span = tl.load(p_keys + span * BN + o_n, mask=(o_n >= 0) & (span >= 0) & (span < count), other=0)
    of_content = base + tl.minimum((block_first + step) * BN + o_n, final)
    return tl.where(span >= 0, of_span, of_content)


@triton.jit(do_not_specialize=["window"], do_not_specialize_on_alignment=["p_scale"])
def _tree_attention_kernel(
    p_q, p_k, p_v, p_out, p_scale,
    p_tiles, p_ranges, p_keys, p_depths, p_slots, p_limits, p_positions, p_offsets,
    window, scale,
    H: tl.constexpr, N: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr, TM: tl.constexpr,
    TILE: tl.constexpr, RANGE: tl.constexpr, SPAN: tl.constexpr, APART: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    i_tile, i_n, i_v = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(p_tiles + i_tile * TILE).to(tl.int64)
    count = tl.load(p_tiles + i_tile * TILE + 1)
    key_first = tl.load(p_tiles + i_tile * TILE + 2)
    spans = tl.load(p_tiles + i_tile * TILE + 3) - key_first
    block_first = tl.load(p_ranges + i_tile * RANGE)
    blocks = tl.load(p_ranges + i_tile * RANGE + 1) - block_first
    base = tl.load(p_ranges + i_tile * RANGE + 2)
    p_keys += key_first.to(tl.int64) * BN
    p_slots += key_first.to(tl.int64) * TM
    p_depths += key_first

    o_n = tl.arange(0, BN)
    o_d = tl.arange(0, BD)
    o_v = i_v * BV + tl.arange(0, BV)
    token = tl.arange(0, BM) // G
    live = token < count
    token = tl.where(live, token, 0)  # rows beyond the tile repeat its first and are not stored
    row = first + token
    at = (row * H + i_n * G + tl.arange(0, BM) % G) * D
    limit = tl.load(p_limits + row)
    position = tl.load(p_positions + row)
    offset = tl.load(p_offsets + row)
    if BD == D:
        o_key, o_value = o_d, o_v
        q = tl.load(p_q + at[:, None] + o_d[None, :])
    else:
        # Columns beyond D repeat the first one: q is zero there, and their results are not stored.
        o_key, o_value = tl.where(o_d < D, o_d, 0), tl.where(o_v < D, o_v, 0)
        q = tl.load(p_q + at[:, None] + o_d[None, :], mask=(o_d < D)[None, :], other=0.0)
    p_k += i_n * D
    p_v += i_n * D

    m = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BV], tl.float32)
    final = tl.max(limit, 0) - 1
    # One loop over both kinds of key tiles: what is loaded ahead for the next one never runs dry between them. What
    # says which rows a tile reads and who sees them is loaded one tile further ahead and carried along. Read where it
    # is used, the compiler would put these loads in line with those of the keys, and wait for all of them at once.
    rows = _key_rows(0, blocks, block_first, base, final, p_keys, spans, o_n, BN)
    depth = tl.load(p_depths, mask=(blocks == 0) & (spans > 0), other=0)
    slot = tl.load(p_slots + token, mask=(token >= 0) & (blocks == 0) & (spans > 0), other=0).to(tl.int32)
    for step in range(blocks + spans):
        at_keys = rows.to(tl.int64)[:, None] * (N * D)
        k = tl.load(p_k + at_keys + o_key[None, :])
        s = tl.dot(q, tl.trans(k))

        # A row sees the columns between `low` and `high`: content positions, or offsets in the branch, with the spans
        # of a tile so far apart that a row is between two numbers in its own one alone.
        in_content = step < blocks
        apart = slot * APART
        column = tl.where(in_content, (block_first + step) * BN + o_n, depth + o_n % SPAN + o_n // SPAN * APART)
        low = tl.where(in_content, position - window, tl.maximum(offset - window, depth - 1) + apart)
        high = tl.where(in_content, limit, offset + 1 + apart)
        visible = (column[None, :] > low[:, None]) & (column[None, :] < high[:, None])
        s = tl.where(visible, s, float("-inf"))

        p, fade, m, total = softmax_step(s, m, total, scale)
        v = tl.load(p_v + at_keys + o_value[None, :])
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None])
        rows = _key_rows(step + 1, blocks, block_first, base, final, p_keys, spans, o_n, BN)
        span = step + 1 - blocks
        of_span = (span >= 0) & (span < spans)
        depth = tl.load(p_depths + span, mask=of_span, other=0)
        slot = tl.load(p_slots + span * TM + token, mask=(token >= 0) & of_span, other=0).to(tl.int32)

    # Padding sees no key. A row whose scores are all -∞ saw some: its zero weights make NaN, which must stay visible.
    padding = (limit == 0) & (offset < 0)
    out = tl.where(padding[:, None], 0.0, acc / total[:, None])
    o_out = at[:, None] + o_v[None, :]
    store_result(p_out, o_out, out, live[:, None] & (o_v < D)[None, :], p_scale, KIND)


@dataclass(frozen=True, slots=True)
class HostPlan:
    """A `TilePlan` and a `PathPlan` for one layout of heads, their arrays in a buffer that is still to be copied."""

    shape: TileShape
    slots: Mapping[str, Slot]
    ranges: Mapping[int | None, Slot]
    path_slots: Mapping[str, Slot]
    firsts: Mapping[int | None, Slot]
    store_rows: tuple[int, ...]
    extra_rows: int


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """The same on the device. extra_rows: key rows behind the pass's, of the stores.

    path_arrays, firsts: of the `PathPlan`; empty where no row is by position
    """

    shape: TileShape
    arrays: Mapping[str, Tensor]
    ranges: Mapping[int | None, Tensor]
    path_arrays: Mapping[str, Tensor]
    firsts: Mapping[int | None, Tensor]
    store_rows: tuple[int, ...]
    extra_rows: int


Layout = tuple[int, int]
"""(G, D): query heads on one key/value head, and their size."""

_ARRAYS = ("tiles", "keys", "depths", "slots", "limits", "positions", "offsets")
_PATH_ARRAYS = ("tiles", "table", "keys")


def stage(
    segments: Segments,
    buffer: HostBuffer,
    layouts: Mapping[Layout, Sequence[int | None]],
    *,
    rows: int,
    store_lengths: Sequence[int] = (),
) -> dict[Layout, HostPlan]:
    """Plan a pass of `rows` rows (T, padding included) and lay the arrays into the buffer.

    layouts  (G, D) of each kind of heads → the distinct windows of its layers
    """
    ends = np.cumsum([rows, *store_lengths]).tolist()
    found = paths(segments, rows, ends[:-1])
    plans: dict[Layout, HostPlan] = {}
    for (group, head_dim), windows in layouts.items():
        shape = tile_shape(head_dim, group)
        sizes = {"tile_rows": shape.tile_rows(group), "block": shape.block_n}
        plan = plan_tiles(found, **sizes, windows=windows)
        by_position = plan_paths(found.rows, **sizes, windows=windows)
        plans[group, head_dim] = HostPlan(
            shape=shape,
            slots={name: buffer.add(getattr(plan, name)) for name in _ARRAYS},
            ranges={window: buffer.add(array) for window, array in plan.ranges.items()},
            path_slots={name: buffer.add(getattr(by_position, name)) for name in _PATH_ARRAYS if by_position},
            firsts={window: buffer.add(array) for window, array in by_position.firsts.items()} if by_position else {},
            store_rows=tuple(ends[:-1]),
            extra_rows=ends[-1] - rows,
        )
    return plans


def on_device(plan: HostPlan, buffer: DeviceBuffer) -> DevicePlan:
    """The plan once its buffer has been copied."""
    return DevicePlan(
        plan.shape,
        {name: buffer.get(slot) for name, slot in plan.slots.items()},
        {window: buffer.get(slot) for window, slot in plan.ranges.items()},
        {name: buffer.get(slot) for name, slot in plan.path_slots.items()},
        {window: buffer.get(slot) for window, slot in plan.firsts.items()},
        plan.store_rows,
        plan.extra_rows,
    )


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    stores: Sequence[tuple[Tensor, Tensor]],
    plan: DevicePlan,
    *,
    window: int | None,
    encoding: Encoding,
) -> Activation:
    """softmax(q · kᵀ) · v along each row's path → [T, H·D] as `encoding` wants it.

    q       [T, H, D], already scaled; bf16 (float32 works too, slowly)
    k, v    [T + E, N, D] of its type; the E rows behind the pass's are filled here from the stores
    stores  this layer's (k, v) of each store of the plan, [L, N, D] each
    Rows that belong to no segment (padding) get zeros.
    """
    for first, (kept_k, kept_v) in zip(plan.store_rows, stores, strict=True):
        k[first : first + kept_k.shape[0]].copy_(kept_k)
        v[first : first + kept_v.shape[0]].copy_(kept_v)
    _, h, d = q.shape
    n = k.shape[1]
    # Other codes than these need a whole row, which no program has.
    direct = encoding if encoding.kind == "fp8_static" else Encoding("float", q.dtype)
    out, scale = empty_rows(q, h * d, direct)
    shape = plan.shape
    width = max(16, next_power_of_2(d))
    columns = min(width, shape.block_v)
    assert all(x.is_contiguous() for x in (q, k, v))
    arrays = [plan.arrays[name] for name in _ARRAYS]
    reach = _EVERYTHING if window is None else window
    sizes = h, n, h // n, d, width, shape.block_m, shape.block_n, columns, shape.tile_rows(h // n)
    options = {"num_warps": shape.num_warps, "num_stages": shape.num_stages, "enable_fp_fusion": False}
    if len(arrays[0]):
        launch(
            _tree_attention_kernel, (len(arrays[0]), n, width // columns), q, k, v, out, scale,
            arrays[0], plan.ranges[window], *arrays[1:], reach, _LOG2_E,
            *sizes, TILE_FIELDS, RANGE_FIELDS, SPAN, _APART, direct.kind, **options,
        )  # fmt: skip
    if plan.path_arrays:
        tiles, table, keys = (plan.path_arrays[name] for name in _PATH_ARRAYS)
        launch(
            path_attention_kernel, (len(tiles), n, width // columns), q, k, v, out, scale,
            tiles, plan.firsts[window], table, keys, plan.arrays["positions"], reach, _LOG2_E,
            *sizes, PATH_FIELDS, direct.kind, **options,
        )  # fmt: skip
    done = as_activation(out, scale)
    return done if direct is encoding else encode(out, encoding)
