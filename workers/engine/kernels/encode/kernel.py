"""Rounding to codes on the GPU, shared by every kernel that writes rows; and the op that does nothing else.

A row is in the registers of one program as float32 [BLOCK], zeros behind its K columns. The kind is a constant at
compile time, by its name. No launch depends on T but in its grid, so that no row count compiles anything.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.engine.kernels.encoding import Activation, Codes, Encoding
from workers.engine.kernels.launch import launch, next_power_of_2

_ROUND = tl.constexpr(12582912.0)  # 1.5 · 2^23: adding it leaves a float32 below 2^22 no bits after the point
_TINY = tl.constexpr(2.0**-126)


@triton.jit
def row_amax(y):
    """max|y| of a row; NaN where one of it is. As integers, magnitudes are ordered alike and NaN comes last."""
    bits = y.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(bits, axis=0).to(tl.float32, bitcast=True)


@triton.jit
def scale_for(amax, LARGEST: tl.constexpr):
    """amax / LARGEST, 1 for zero, never subnormal: `quant.rounding.scale_for`."""
    step = tl.div_rn(amax, LARGEST)
    step = tl.where(step < _TINY, _TINY, step)
    return tl.where(amax == 0.0, 1.0, step)


@triton.jit
def e4m3_codes(y, scale):
    """e4m3(y / scale) of a block; the scale is one number."""
    if (scale.to(tl.int32, bitcast=True) & 0x7FFFFF) == 0:  # noqa: SIM108 - Triton compiles no such expression
        quotient = y * tl.div_rn(1.0, scale)  # a power of two, as calibrated scales are: the product is the quotient
    else:
        quotient = tl.div_rn(y, scale)
    return tl.clamp(quotient, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


@triton.jit
def int8_codes(y, scale):
    """int8(y / scale) of a block, to nearest, ties to even."""
    quotient = tl.clamp(tl.div_rn(y, scale), -127.0, 127.0)
    return ((quotient + _ROUND) - _ROUND).to(tl.int8)


@triton.jit
def store_row(y, row, at, mask, out, scale, K: tl.constexpr, KIND: tl.constexpr):
    """Write row `row` of out [T, K], and its scale [T] if the row has one; `fp8_static` reads its scale [1]."""
    to = out + row * K + at
    if KIND == "float":
        tl.store(to, y.to(out.dtype.element_ty), mask=mask)
    elif KIND == "fp8_static":
        tl.store(to, e4m3_codes(y, tl.load(scale)), mask=mask)
    elif KIND == "fp8_row":
        step = scale_for(row_amax(y), 448.0)
        tl.store(scale + row, step)
        tl.store(to, e4m3_codes(y, step), mask=mask)
    else:
        tl.static_assert(KIND == "int8_row")
        step = scale_for(row_amax(y), 127.0)
        tl.store(scale + row, step)
        tl.store(to, int8_codes(y, step), mask=mask)


def empty_rows(like: Tensor, width: int, encoding: Encoding) -> tuple[Tensor, Tensor | None]:
    """Room for rows [T, width] in `encoding`, on the device of like [T, ...], and the scale that kernels read or write.

    ValueError for `fp8_stream`, which no single kernel makes.
    """
    rows = like.shape[0]
    if encoding.kind == "float":
        return like.new_empty(rows, width, dtype=encoding.dtype), None
    if encoding.kind == "fp8_static":
        return like.new_empty(rows, width, dtype=torch.float8_e4m3fn), encoding.scale
    if encoding.kind == "fp8_stream":
        raise ValueError("the scale of a stream is known after its last row")
    dtype = torch.int8 if encoding.kind == "int8_row" else torch.float8_e4m3fn
    return like.new_empty(rows, width, dtype=dtype), like.new_empty(rows, dtype=torch.float32)


def as_activation(values: Tensor, scale: Tensor | None) -> Activation:
    """What `empty_rows` gave, filled."""
    return values if scale is None else Codes(values, scale)


def row_warps(block: int) -> int:
    """Warps of a program that holds one row: 32 columns a thread, as far as 16 warps go. Fixed: it orders the sums."""
    return max(1, min(16, block // 1024))


# A scale may lie anywhere inside a larger tensor: its alignment must not choose a variant.
@triton.jit(do_not_specialize_on_alignment=["scale"])
def _encode_kernel(y, out, scale, K: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < K
    store_row(tl.load(y + row * K + at, mask=mask, other=0.0).to(tl.float32), row, at, mask, out, scale, K, KIND)


@triton.jit
def _row_amax_kernel(y, amax, K: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    tl.store(amax + row, row_amax(tl.load(y + row * K + at, mask=at < K, other=0.0).to(tl.float32)))


@triton.jit(do_not_specialize=["rows"])
def _stream_scale_kernel(amax, scale, rows, BLOCK: tl.constexpr):
    """The scale of a stream from the largest magnitudes of its rows: one program."""
    at = tl.arange(0, BLOCK)
    bits = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, rows, BLOCK):
        part = tl.load(amax + start + at, mask=start + at < rows, other=0.0)
        bits = tl.maximum(bits, part.to(tl.int32, bitcast=True))
    tl.store(scale, scale_for(tl.max(bits, axis=0).to(tl.float32, bitcast=True), 448.0))


def encode(y: Tensor, encoding: Encoding) -> Activation:
    """The op of `kernels.encode`: y [T, K] float32 or bf16, contiguous."""
    assert y.is_contiguous()
    if encoding.kind == "fp8_stream":
        encoding = Encoding("fp8_static", encoding.dtype, _stream_scale(y))
    rows, width = y.shape
    values, scale = empty_rows(y, width, encoding)
    block = next_power_of_2(width)
    launch(_encode_kernel, (rows,), y, values, scale, width, block, encoding.kind, num_warps=row_warps(block))
    return as_activation(values, scale)


def _stream_scale(y: Tensor) -> Tensor:
    """y [T, K] → float32 [1]; y is read once, and no number leaves the device."""
    rows, width = y.shape
    amax, scale = y.new_empty(rows, dtype=torch.float32), y.new_empty(1, dtype=torch.float32)
    block = next_power_of_2(width)
    launch(_row_amax_kernel, (rows,), y, amax, width, block, num_warps=row_warps(block))
    launch(_stream_scale_kernel, (1,), amax, scale, rows, 1024)
    return scale
