"""Norms on the GPU: one program reads a row once, and writes it as the next linear wants it.

Nothing is fused into multiply-adds but what is spelled so: a compiler's choice might differ from loop to loop.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.engine.kernels.encode.kernel import as_activation, empty_rows, encode, row_warps, store_row
from workers.engine.kernels.encoding import Activation, Encoding
from workers.engine.kernels.launch import launch, next_power_of_2

_WHOLE = torch.float32
"""What a row is written as where its scale takes all rows."""

_PROGRAMS = 4
"""Programs of a multiprocessor that share the rows of `residual_norm`: enough to keep the memory busy between them."""


@triton.jit
def inverse_rms(squares, WIDTH: tl.constexpr, EPS: tl.constexpr):
    """1 / √(squares / WIDTH + eps), from the sum of the squares of WIDTH numbers."""
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares, WIDTH * 1.0) + EPS))


# Scales may lie anywhere inside a larger tensor: the alignment of one number must not choose a variant.
@triton.jit(do_not_specialize_on_alignment=["out_scale"])
def _norm_kernel(
    x,
    scale,
    out,
    out_scale,
    K: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < K
    values = tl.load(x + row * K + at, mask=mask, other=0.0).to(tl.float32)
    y = values * inverse_rms(tl.sum(values * values, axis=0), K, EPS)
    if scale is not None:
        y = y * tl.load(scale + at, mask=mask, other=0.0)
    store_row(y, row, at, mask, out, out_scale, K, KIND)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["layer_scalar", "out_scale"])
def _residual_norm_kernel(
    x,
    h,
    post_scale,
    layer_scalar,
    next_scale,
    out,
    out_scale,
    rows,
    K: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
):
    """A program takes every `step`th row: the scales stay in registers, and the next row is on its way meanwhile."""
    at = tl.arange(0, BLOCK)
    mask = at < K
    post = tl.load(post_scale + at, mask=mask, other=0.0)
    following = tl.load(next_scale + at, mask=mask, other=0.0)
    first = tl.program_id(0)
    step = tl.num_programs(0)
    row = first.to(tl.int64)
    next_h = tl.load(h + row * K + at, mask=mask & (row < rows), other=0.0)
    next_x = tl.load(x + row * K + at, mask=mask & (row < rows), other=0.0)
    for _ in range(first, rows, step):
        added = next_h.to(tl.float32)
        values = next_x.to(tl.float32)
        next_h = tl.load(h + (row + step) * K + at, mask=mask & (row + step < rows), other=0.0)
        next_x = tl.load(x + (row + step) * K + at, mask=mask & (row + step < rows), other=0.0)
        values += added * inverse_rms(tl.sum(added * added, axis=0), K, EPS) * post
        if layer_scalar is not None:
            values *= tl.load(layer_scalar)
        kept = values.to(x.dtype.element_ty)
        tl.store(x + row * K + at, kept, mask=mask)
        values = kept.to(tl.float32)
        y = values * inverse_rms(tl.sum(values * values, axis=0), K, EPS) * following
        store_row(y, row, at, mask, out, out_scale, K, KIND)
        row += step


def norm_encode(x: Tensor, scale: Tensor | None, eps: float, encoding: Encoding) -> Activation:
    """The op of `kernels.rms_norm`: x [T, K] float32 or bf16, scale [K] float32 or None for 1."""
    assert x.is_contiguous()
    if encoding.kind == "fp8_stream":
        whole = norm_encode(x, scale, eps, Encoding("float", _WHOLE))
        assert isinstance(whole, Tensor)
        return encode(whole, encoding)
    rows, width = x.shape
    out, out_scale = empty_rows(x, width, encoding)
    block = next_power_of_2(width)
    arguments = (x, scale, out, out_scale, width, eps, block, encoding.kind)
    launch(_norm_kernel, (rows,), *arguments, num_warps=row_warps(block), enable_fp_fusion=False)
    return as_activation(out, out_scale)


def residual_norm(
    x: Tensor,
    h: Tensor,
    post_scale: Tensor,
    layer_scalar: Tensor | None,
    next_scale: Tensor,
    eps: float,
    encoding: Encoding,
) -> Activation:
    """The op of `kernels.rms_norm`: x [T, K] float32 or bf16, updated in place; h [T, K] likewise; scales float32."""
    assert x.is_contiguous()
    assert h.is_contiguous()
    assert x.dtype in (torch.float32, torch.bfloat16)
    if encoding.kind == "fp8_stream":
        float32 = Encoding("float", _WHOLE)
        whole = residual_norm(x, h, post_scale, layer_scalar, next_scale, eps, float32)
        assert isinstance(whole, Tensor)
        return encode(whole, encoding)
    rows, width = x.shape
    out, out_scale = empty_rows(x, width, encoding)
    block = next_power_of_2(width)
    arguments = (x, h, post_scale, layer_scalar, next_scale, out, out_scale, rows, width, eps, block, encoding.kind)
    grid = (min(rows, _programs(x.device)),)
    launch(_residual_norm_kernel, grid, *arguments, num_warps=row_warps(block), enable_fp_fusion=False)
    return as_activation(out, out_scale)


@cache
def _programs(device: torch.device) -> int:
    """Programs that share the rows; interpreted, few, so that each has several."""
    if device.type != "cuda":
        return 3
    return _PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count
