"""Tree attention in Triton: one program for a query tile (rows of one tree times the G query heads) and a kv head.

An online softmax in float32 over the tile's keys in the order of `tiles`: content blocks, then key tiles of branch
spans. Keys that a row does not see weigh exactly nothing and leave its maximum, sum and result as they are, so a row's
bits depend on its own path alone: not on the tile it stands in, not on the slot that its span has, not on the pass.
What that rests on, and the tests measure: the matrix units add a step's 16 products in an order that has nothing to do
with the row or with other steps, and a sum over a row's columns takes the same tree for every row and slot.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.engine.kernels.encoding import Activation, Codes, Encoding
from workers.engine.kernels.launch import launch
from workers.engine.kernels.tree_attention.segments import Segments
from workers.engine.kernels.tree_attention.tiles import RANGE_FIELDS, SPAN, TILE_FIELDS, paths, plan_tiles
from workers.engine.staging import DeviceBuffer, HostBuffer, Slot

_LOG2_E = 1.4426950408889634
_E4M3_MAX = 448.0
_BLOCK, _WIDE_HEADS_BLOCK = 64, 32  # keys of a tile (BN), for heads up to 256 and wider
_EVERYTHING = 1 << 30  # a window that no position reaches


@dataclass(frozen=True, slots=True)
class TileShape:
    """Query rows times heads (BM), keys (BN), warps and pipeline stages. BN is part of the bits, the rest is not."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def tile_rows(self, group: int) -> int:
        """Rows of the pass in a query tile (TM)."""
        return self.block_m // group


def tile_shape(head_dim: int, group: int) -> TileShape:
    """The tile of a head dimension: the accumulator [BM, D] must fit the registers, the keys the shared memory."""
    if group > 64:
        raise ValueError(f"{group} query heads on one key/value head: at most 64 are supported")
    if head_dim > 256:
        return TileShape(64, _WIDE_HEADS_BLOCK, 8, 2)
    return TileShape(128, _BLOCK, 8, 2 if head_dim > 128 else 3)


BITS = {"attention_span": SPAN, "attention_block": _BLOCK, "attention_block_wide_heads": _WIDE_HEADS_BLOCK}
"""The constants that the bits depend on."""


@triton.jit
def _step(
    q, m, total, acc, visible, p_k, p_v, scale,
    MASKED: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """One key tile: q [BM, BD], p_k and p_v pointers [BN, BD] → the next (m, total, acc). m is unscaled."""
    k = tl.load(p_k)
    s = tl.dot(q, tl.trans(k))
    if MASKED:
        s = tl.where(visible, s, float("-inf"))
    top = tl.maximum(m, tl.max(s, 1))
    # A row that has seen no key yet has no maximum to subtract.
    safe = tl.where(top == float("-inf"), 0.0, top)
    # Spelled as one fused operation: left to the compiler, it might fuse in one of the loops and not in another.
    p = tl.exp2(tl.fma(s, scale, -(safe * scale)[:, None]))
    fade = tl.exp2((m - safe) * scale)
    if SPANS > 1:  # noqa: SIM108 - a choice of the compiler's
        # All but one of the spans are zero: their sum has the same bits in whichever slot it stands.
        added = tl.sum(tl.sum(tl.reshape(p, [p.shape[0], SPANS, p.shape[1] // SPANS]), 2), 1)
    else:
        added = tl.sum(p, 1)
    total = total * fade + added
    v = tl.load(p_v)
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None])
    return top, total, acc


@triton.jit(do_not_specialize=["window"], do_not_specialize_on_alignment=["p_scale"])
def _tree_attention_kernel(
    p_q, p_k, p_v, p_out, p_scale,
    p_tiles, p_ranges, p_keys, p_depths, p_slots, p_limits, p_positions, p_offsets,
    window, scale,
    H: tl.constexpr, N: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, TM: tl.constexpr, STAGES: tl.constexpr,
    TILE: tl.constexpr, RANGE: tl.constexpr, STEP: tl.constexpr, FP8: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    i_tile, i_n = tl.program_id(0), tl.program_id(1)
    first = tl.load(p_tiles + i_tile * TILE).to(tl.int64)
    count = tl.load(p_tiles + i_tile * TILE + 1)
    key_first = tl.load(p_tiles + i_tile * TILE + 2)
    key_last = tl.load(p_tiles + i_tile * TILE + 3)
    block_first = tl.load(p_ranges + i_tile * RANGE)
    full_first = tl.load(p_ranges + i_tile * RANGE + 1)
    full_last = tl.load(p_ranges + i_tile * RANGE + 2)
    block_last = tl.load(p_ranges + i_tile * RANGE + 3)
    base = tl.load(p_ranges + i_tile * RANGE + 4).to(tl.int64)

    o_n = tl.arange(0, BN)
    o_d = tl.arange(0, BD)
    token = tl.arange(0, BM) // G
    live = token < count
    token = tl.where(live, token, 0)  # rows beyond the tile repeat its first and are not stored
    row = first + token
    at = (row * H + i_n * G + tl.arange(0, BM) % G) * D
    limit = tl.load(p_limits + row)
    position = tl.load(p_positions + row)
    offset = tl.load(p_offsets + row)
    if BD == D:
        o_key = o_d
        q = tl.load(p_q + at[:, None] + o_d[None, :])
    else:
        # Columns beyond D repeat the first one: q is zero there, and their results are not stored.
        o_key = tl.where(o_d < D, o_d, 0)
        q = tl.load(p_q + at[:, None] + o_d[None, :], mask=(o_d < D)[None, :], other=0.0)
    p_k += i_n * D
    p_v += i_n * D

    m = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BD], tl.float32)
    final = tl.max(limit, 0) - 1  # no key beyond it is read: it would be another tree's
    for block in tl.range(block_first, full_first, num_stages=STAGES):
        o_p = block * BN + o_n
        visible = (o_p[None, :] < limit[:, None]) & (o_p[None, :] > (position - window)[:, None])
        o_kv = (base + tl.minimum(o_p, final))[:, None] * (N * D) + o_key[None, :]
        m, total, acc = _step(q, m, total, acc, visible, p_k + o_kv, p_v + o_kv, scale, True, 1)
    for block in tl.range(full_first, full_last, num_stages=STAGES):
        o_kv = (base + block * BN + o_n)[:, None] * (N * D) + o_key[None, :]
        m, total, acc = _step(q, m, total, acc, live, p_k + o_kv, p_v + o_kv, scale, False, 1)
    for block in tl.range(full_last, block_last, num_stages=STAGES):
        o_p = block * BN + o_n
        visible = (o_p[None, :] < limit[:, None]) & (o_p[None, :] > (position - window)[:, None])
        o_kv = (base + tl.minimum(o_p, final))[:, None] * (N * D) + o_key[None, :]
        m, total, acc = _step(q, m, total, acc, visible, p_k + o_kv, p_v + o_kv, scale, True, 1)
    for i_key in tl.range(key_first, key_last, num_stages=STAGES):
        slot = tl.load(p_slots + i_key * TM + token).to(tl.int32)
        o_branch = tl.load(p_depths + i_key) + o_n % STEP
        visible = (slot[:, None] == (o_n // STEP)[None, :]) & (o_branch[None, :] <= offset[:, None])
        visible = visible & (o_branch[None, :] > (offset - window)[:, None])
        o_kv = tl.load(p_keys + i_key * BN + o_n).to(tl.int64)[:, None] * (N * D) + o_key[None, :]
        m, total, acc = _step(q, m, total, acc, visible, p_k + o_kv, p_v + o_kv, scale, True, BN // STEP)

    out = acc / total[:, None]
    o_out = at[:, None] + o_d[None, :]
    keep = live[:, None] & (o_d < D)[None, :]
    if FP8:
        code = tl.div_rn(out, tl.load(p_scale) + tl.zeros_like(out))
        code = tl.where(code > LARGEST, LARGEST, tl.where(code < -LARGEST, -LARGEST, code))  # NaN stays
        tl.store(p_out + o_out, code.to(tl.float8e4nv), mask=keep)
    else:
        tl.store(p_out + o_out, out.to(p_out.dtype.element_ty), mask=keep)


@dataclass(frozen=True, slots=True)
class HostPlan:
    """A `TilePlan` for one layout of heads, its arrays in a buffer that is still to be copied."""

    shape: TileShape
    rows: int
    slots: Mapping[str, Slot]
    ranges: Mapping[int | None, Slot]
    store_rows: tuple[int, ...]
    extra_rows: int


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """The same on the device. rows: real rows of the pass; extra_rows: key rows behind the pass's, of the stores."""

    shape: TileShape
    rows: int
    arrays: Mapping[str, Tensor]
    ranges: Mapping[int | None, Tensor]
    store_rows: tuple[int, ...]
    extra_rows: int


Layout = tuple[int, int]
"""(G, D): query heads on one key/value head, and their size."""

_ARRAYS = ("tiles", "keys", "depths", "slots", "limits", "positions", "offsets")


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
    found = paths(segments, ends[:-1])
    plans: dict[Layout, HostPlan] = {}
    for (group, head_dim), windows in layouts.items():
        shape = tile_shape(head_dim, group)
        plan = plan_tiles(found, tile_rows=shape.tile_rows(group), block=shape.block_n, windows=windows)
        plans[group, head_dim] = HostPlan(
            shape=shape,
            rows=len(plan.limits),
            slots={name: buffer.add(getattr(plan, name)) for name in _ARRAYS},
            ranges={window: buffer.add(array) for window, array in plan.ranges.items()},
            store_rows=tuple(ends[:-1]),
            extra_rows=ends[-1] - rows,
        )
    return plans


def on_device(plan: HostPlan, buffer: DeviceBuffer) -> DevicePlan:
    """The plan once its buffer has been copied."""
    return DevicePlan(
        plan.shape,
        plan.rows,
        {name: buffer.get(slot) for name, slot in plan.slots.items()},
        {window: buffer.get(slot) for window, slot in plan.ranges.items()},
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
    static = encoding.kind == "fp8_static"
    t, h, d = q.shape
    n = k.shape[1]
    out = q.new_empty(t, h * d, dtype=torch.float8_e4m3fn if static else q.dtype)
    if plan.rows < t:
        out[plan.rows :].view(torch.uint8).zero_()
    shape = plan.shape
    assert all(x.is_contiguous() for x in (q, k, v))
    arrays = [plan.arrays[name] for name in _ARRAYS]
    launch(
        _tree_attention_kernel, (arrays[0].shape[0], n), q, k, v, out, encoding.scale if static else q,
        arrays[0], plan.ranges[window], *arrays[1:],
        _EVERYTHING if window is None else window, _LOG2_E,
        H=h, N=n, G=h // n, D=d, BD=max(16, triton.next_power_of_2(d)),
        BM=shape.block_m, BN=shape.block_n, TM=shape.tile_rows(h // n), STAGES=shape.num_stages,
        TILE=TILE_FIELDS, RANGE=RANGE_FIELDS, STEP=SPAN, FP8=static, LARGEST=_E4M3_MAX,
        num_warps=shape.num_warps, enable_fp_fusion=False,
    )  # fmt: skip
    if not static:
        from workers.engine.kernels.encode import encode

        return encode(out, encoding)
    assert encoding.scale is not None
    return Codes(out, encoding.scale)
