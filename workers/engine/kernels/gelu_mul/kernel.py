"""The gated activation on the GPU: in tiles, or in whole rows where a row has its own scale."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.engine.kernels.encode.kernel import as_activation, empty_rows, encode, store_row
from workers.engine.kernels.encoding import Activation, Encoding
from workers.engine.kernels.launch import cdiv, launch, next_power_of_2

_C1 = tl.constexpr(-2.0 * math.sqrt(2.0 / math.pi) * math.log2(math.e))
_C3 = tl.constexpr(-2.0 * math.sqrt(2.0 / math.pi) * math.log2(math.e) * 0.044715)


@triton.jit
def _gelu_mul(gate, up, pending):
    """gelu_tanh(gate) · up = gate / (1 + 2^(gate · (C1 + C3 · gate²))) · up; pending [2] multiplies them first."""
    if pending is not None:
        gate *= tl.load(pending)
        up *= tl.load(pending + 1)
    return gate / (1.0 + tl.exp2(gate * (gate * gate * _C3 + _C1))) * up


# Scales may lie anywhere inside a larger tensor: their alignment must not choose a variant.
@triton.jit(do_not_specialize_on_alignment=["pending", "out_scale"])
def _gelu_mul_kernel(
    gate_up,
    pending,
    out,
    out_scale,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
):
    """Columns BLOCK · i and on of one row; i = 0 is the whole row where it has a scale of its own."""
    tiles: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    row = (program // tiles).to(tl.int64)
    at = program % tiles * BLOCK + tl.arange(0, BLOCK)
    mask = at < WIDTH
    start = gate_up + row * (2 * WIDTH) + at
    gate = tl.load(start, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(start + WIDTH, mask=mask, other=0.0).to(tl.float32)
    store_row(_gelu_mul(gate, up, pending), row, at, mask, out, out_scale, WIDTH, KIND)


def gelu_mul_encode(gate_up: Tensor, encoding: Encoding, pending: Tensor | None) -> Activation:
    """The op of `kernels.gelu_mul`: gate_up [T, 2·I] bf16 or float32, pending [2] float32 or None for 1."""
    assert gate_up.is_contiguous()
    if encoding.kind == "fp8_stream":
        whole = gelu_mul_encode(gate_up, Encoding("float", torch.float32), pending)
        assert isinstance(whole, Tensor)
        return encode(whole, encoding)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out, out_scale = empty_rows(gate_up, width, encoding)
    block, warps = _tile(width, encoding)
    grid = (rows * cdiv(width, block),)
    launch(_gelu_mul_kernel, grid, gate_up, pending, out, out_scale, width, block, encoding.kind, num_warps=warps)
    return as_activation(out, out_scale)


def _tile(width: int, encoding: Encoding) -> tuple[int, int]:
    """(columns of a program, its warps). A row with its own scale stays in registers, 32 numbers a thread."""
    if encoding.kind in ("fp8_row", "int8_row"):
        block = next_power_of_2(width)
        return block, max(1, min(32, block // 1024))
    return 1024, 4
