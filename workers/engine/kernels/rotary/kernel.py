"""Split, norms and rotation on the GPU: a program takes some heads of one token, all of q, of k or of v."""

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from workers.engine.kernels.launch import cdiv, launch, next_power_of_2
from workers.engine.kernels.rms_norm.kernel import inverse_rms

if TYPE_CHECKING:
    from workers.engine.kernels.rotary import HeadLayout

_TILE = 1024
"""Numbers in half of a program's heads: 8 for each of its 128 threads."""


@triton.jit
def _load(x, pending, PART: tl.constexpr, at, mask, D: tl.constexpr):
    """Both halves [heads, D/2] of heads as float32, times the scale that is pending for their part."""
    first = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + at + D // 2, mask=mask, other=0.0).to(tl.float32)
    if pending is not None:
        factor = tl.load(pending + PART)
        first *= factor
        second *= factor
    return first, second


@triton.jit
def _norm(first, second, D: tl.constexpr, EPS: tl.constexpr):
    """Each head over its root mean square."""
    inverse = inverse_rms(tl.sum(first * first + second * second, axis=1), D, EPS)[:, None]
    return first * inverse, second * inverse


@triton.jit
def _rotate_heads(
    x,
    out,
    pending,
    PART: tl.constexpr,
    scale,
    cos,
    sin,
    heads,
    d,
    TOTAL: tl.constexpr,
    D: tl.constexpr,
    EPS: tl.constexpr,
):
    """Some `heads` of the TOTAL in x [TOTAL, D] to out [TOTAL, D]: norm, scale [D], rotation by cos, sin [D/2]."""
    half: tl.constexpr = D // 2
    columns = d < half
    at = heads[:, None] * D + d[None, :]
    mask = (heads < TOTAL)[:, None] & columns[None, :]
    first, second = _load(x, pending, PART, at, mask, D)
    first, second = _norm(first, second, D, EPS)
    first *= tl.load(scale + d, mask=columns, other=0.0)[None, :]
    second *= tl.load(scale + half + d, mask=columns, other=0.0)[None, :]
    c = tl.load(cos + d, mask=columns, other=0.0)[None, :]
    s = tl.load(sin + d, mask=columns, other=0.0)[None, :]
    tl.store(out + at, (first * c - second * s).to(out.dtype.element_ty), mask=mask)
    tl.store(out + at + half, (second * c + first * s).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _copy_heads(
    x,
    out,
    pending,
    PART: tl.constexpr,
    heads,
    d,
    TOTAL: tl.constexpr,
    D: tl.constexpr,
    EPS: tl.constexpr,
    NORM: tl.constexpr,
):
    """Some `heads` of the TOTAL in x [TOTAL, D] to out [TOTAL, D], normed or as they are."""
    at = heads[:, None] * D + d[None, :]
    mask = (heads < TOTAL)[:, None] & (d < D // 2)[None, :]
    first, second = _load(x, pending, PART, at, mask, D)
    if NORM:
        first, second = _norm(first, second, D, EPS)
    tl.store(out + at, first.to(out.dtype.element_ty), mask=mask)
    tl.store(out + at + D // 2, second.to(out.dtype.element_ty), mask=mask)


# The pending scales may lie anywhere inside a larger tensor: their alignment must not choose a variant.
@triton.jit(do_not_specialize_on_alignment=["pending"])
def _qkv_kernel(
    qkv,
    pending,
    q_scale,
    k_scale,
    cos,
    sin,
    q,
    k,
    v,
    H: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    SHARED: tl.constexpr,
    NORM_V: tl.constexpr,
    EPS: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Of a token, programs of Q_HEADS query heads, then of KV_HEADS key heads, then as many for the values.

    HALF: a power of two, D/2 at least.
    """
    q_blocks: tl.constexpr = (H + Q_HEADS - 1) // Q_HEADS
    kv_blocks: tl.constexpr = (N + KV_HEADS - 1) // KV_HEADS
    blocks: tl.constexpr = q_blocks + 2 * kv_blocks
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    block = program % blocks
    d = tl.arange(0, HALF)
    queries = qkv + row * ((H + (N if SHARED else 2 * N)) * D)
    keys = queries + H * D
    cos += row * (D // 2)
    sin += row * (D // 2)
    if block < q_blocks:
        of_q = block * Q_HEADS + tl.arange(0, Q_HEADS)
        _rotate_heads(queries, q + row * (H * D), pending, 0, q_scale, cos, sin, of_q, d, H, D, EPS)
    else:
        of_kv = (block - q_blocks) % kv_blocks * KV_HEADS + tl.arange(0, KV_HEADS)
        if block < q_blocks + kv_blocks:
            _rotate_heads(keys, k + row * (N * D), pending, 1, k_scale, cos, sin, of_kv, d, N, D, EPS)
        elif SHARED:
            _copy_heads(keys, v + row * (N * D), pending, 1, of_kv, d, N, D, EPS, NORM_V)
        else:
            _copy_heads(keys + N * D, v + row * (N * D), pending, 2, of_kv, d, N, D, EPS, NORM_V)


def qkv_norm_rotary(
    qkv: Tensor,
    layout: "HeadLayout",
    q_scale: Tensor,
    k_scale: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    norm_v: bool,
    pending: Tensor | None,
    extra_rows: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The op of `kernels.rotary` on a GPU: q [T, H, D], k and v [T+E, N, D]."""
    assert qkv.is_contiguous()
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    rows, h, n, d = qkv.shape[0], layout.num_heads, layout.num_kv_heads, layout.head_dim
    q = qkv.new_empty(rows, h, d)
    k, v = qkv.new_empty(rows + extra_rows, n, d), qkv.new_empty(rows + extra_rows, n, d)
    half = next_power_of_2(d // 2)
    most = max(1, _TILE // half)
    q_heads, kv_heads = min(most, next_power_of_2(h)), min(most, next_power_of_2(n))
    blocks = cdiv(h, q_heads) + 2 * cdiv(n, kv_heads)
    shape = (h, n, d, layout.shared_kv, norm_v, eps, q_heads, kv_heads, half)
    launch(_qkv_kernel, (rows * blocks,), qkv, pending, q_scale, k_scale, cos, sin, q, k, v, *shape, num_warps=2)
    return q, k, v
