"""x [T, K] · weight [O, K]ᵀ → bf16 [T, O] on an NVIDIA GPU, in one kernel whose rows cannot see each other.

Three kinds of operands:

    bf16 · bf16   float32 sums
    bf16 · int8   codes become bf16 in registers, exactly; float32 sums, times the channel's scale
    int8 · int8   exact int32 sums; float32 from there: times the row's scale, times the channel's

One rounding to bf16 at the end.

Why a row's bits do not depend on T: a program computes one tile of rows and channels over all of K, from its first
block to its last, in one accumulator; no sum is split over programs. The tile's sizes are constants of (operands, O,
architecture), nothing is compiled for a T, and the order of the programs decides only who computes which tile. Every
element of a tile goes through the same instructions on its own row and channel, wherever in the tile they lie; the rows
past T that fill the last tile are copies of row T - 1, and are not stored.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.engine.kernels.launch import cdiv, launch

__all__ = ["linear"]

GROUP = 8  # tiles of rows that share a sweep over the channels
MAX_INT8_K = 1 << 17
"""127² · K stays below 2^31."""


class Tile(NamedTuple):
    """Rows, channels, K of a block; warps and pipeline stages of a program."""

    rows: int
    channels: int
    k: int
    warps: int
    stages: int


def tile(x: torch.dtype, weight: torch.dtype, channels: int, major: int) -> Tile:
    """The tile of a product. channels: O; major: of the compute capability.

    Wide outputs take wide tiles, for the reuse; narrow ones smaller tiles, so that a short pass still fills the card.
    """
    if major != 9:  # 99 KiB of shared memory on the smallest
        return Tile(128, 128, 64 if x == torch.int8 else 32, 8, 3)
    if weight == torch.int8 and x == torch.bfloat16:
        return Tile(128, 128, 64, 8, 4)
    width = 256 if channels >= 8192 else 128
    return Tile(128, width, 128 if x == torch.int8 else 64, 8 if width == 256 else 4, 3)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["row_scale"])
def _linear_kernel(
    x,
    weight,
    row_scale,
    channel_scale,
    out,
    rows,
    K: tl.constexpr,
    O: tl.constexpr,  # noqa: E741
    BT: tl.constexpr,
    BO: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    ROW_SCALED: tl.constexpr,
    CHANNEL_SCALED: tl.constexpr,
):
    # GROUP tiles of rows share a sweep over the channels: what they read stays in the L2 cache
    row_tiles = tl.cdiv(rows, BT)
    channel_tiles: tl.constexpr = (O + BO - 1) // BO
    per_group: tl.constexpr = GROUP * channel_tiles
    program = tl.program_id(0)
    group = program // per_group
    first_tile = group * GROUP
    tiles = min(row_tiles - first_tile, GROUP)
    within = program % per_group
    row = (first_tile + within % tiles) * BT
    channel = (within // tiles) * BO

    # 64-bit for the tile, 32-bit inside of it
    x += row.to(tl.int64) * K
    weight += channel.to(tl.int64) * K
    i_row = tl.arange(0, BT)
    i_channel = tl.arange(0, BO)
    i_k = tl.arange(0, BK)
    p_x = x + (tl.minimum(i_row, rows - 1 - row)[:, None] * K + i_k[None, :])
    p_weight = weight + (tl.minimum(i_channel, O - 1 - channel)[:, None] * K + i_k[None, :])

    mixed: tl.constexpr = x.dtype.element_ty != weight.dtype.element_ty
    exact: tl.constexpr = x.dtype.element_ty == tl.int8
    sum_type: tl.constexpr = tl.int32 if exact else tl.float32
    # mixed: the converted operand lies in registers, which the tensor cores take on the left only
    acc = tl.zeros((BO, BT) if mixed else (BT, BO), sum_type)
    for k in range(0, K, BK):
        if K % BK == 0:
            b_x = tl.load(p_x)
            b_weight = tl.load(p_weight)
        else:
            b_x = tl.load(p_x, mask=i_k[None, :] < K - k, other=0)
            b_weight = tl.load(p_weight, mask=i_k[None, :] < K - k, other=0)
        if mixed:
            acc = tl.dot(b_weight.to(tl.bfloat16), tl.trans(b_x), acc)
        else:
            acc = tl.dot(b_x, tl.trans(b_weight), acc, out_dtype=sum_type)
        p_x += BK
        p_weight += BK

    result = acc.to(tl.float32)
    if mixed:
        result = tl.trans(result)
    here_row = row + i_row
    here_channel = channel + i_channel
    if ROW_SCALED:
        result *= tl.load(row_scale + here_row, mask=here_row < rows, other=0.0)[:, None]
    if CHANNEL_SCALED:
        result *= tl.load(channel_scale + here_channel, mask=here_channel < O, other=0.0)[None, :]
    p_out = out + row.to(tl.int64) * O + channel + (i_row[:, None] * O + i_channel[None, :])
    tl.store(p_out, result.to(tl.bfloat16), mask=(here_row < rows)[:, None] & (here_channel < O)[None, :])


def linear(x: Tensor, weight: Tensor, row_scale: Tensor | None = None, channel_scale: Tensor | None = None) -> Tensor:
    """x [T, K] · weight [O, K]ᵀ · row_scale [T] · channel_scale [O] → bf16 [T, O]; scales float32, in this order.

    x and weight, both contiguous: bf16 and bf16, bf16 and int8, or int8 and int8. TypeError for others.
    """
    if (x.dtype, weight.dtype) not in _OPERANDS:
        raise TypeError(f"no product of {x.dtype} with {weight.dtype}")
    rows, k = x.shape
    channels = weight.shape[0]
    assert all(t.is_contiguous() for t in (x, weight))
    assert weight.shape[1] == k
    assert x.dtype != torch.int8 or k <= MAX_INT8_K
    sizes = tile(x.dtype, weight.dtype, channels, _major(x.device))
    out = torch.empty(rows, channels, dtype=torch.bfloat16, device=x.device)
    grid = (cdiv(rows, sizes.rows) * cdiv(channels, sizes.channels),)
    launch(
        _linear_kernel,
        grid,
        x,
        weight,
        row_scale,
        channel_scale,
        out,
        rows,
        K=k,
        O=channels,
        BT=sizes.rows,
        BO=sizes.channels,
        BK=sizes.k,
        GROUP=GROUP,
        ROW_SCALED=row_scale is not None,
        CHANNEL_SCALED=channel_scale is not None,
        num_warps=sizes.warps,
        num_stages=sizes.stages,
    )
    return out


_OPERANDS = ((torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.int8), (torch.int8, torch.int8))


def _major(device: torch.device) -> int:
    """Of the compute capability; the interpreter takes the newest tiles."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9
