"""gelu_tanh(x) = x · (1 + tanh(u)) / 2 = x / (1 + exp(-2u)), u = √(2/π) · (x + 0.044715·x³), spelled with ops that
round each element alike wherever it stands. For x far below zero exp overflows to infinity and the value is a right
zero.
"""

import math

import torch
from torch import Tensor

from workers.engine.kernels.encoding import Activation, Encoding
from workers.engine.kernels.pieces import each, row_pieces

_C1 = -2.0 * math.sqrt(2.0 / math.pi)
_C3 = _C1 * 0.044715


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2·K] → gelu_tanh(gate) · up [T, K], computed in float32 and rounded once."""
    width = gate_up.shape[1] // 2
    whole = gate_up.new_empty(gate_up.shape[0], width)

    def work(rows: slice) -> None:
        out = whole[rows]
        gate, up = gate_up[rows].float().chunk(2, dim=1)
        inner = out if out.dtype == torch.float32 else torch.empty_like(gate, memory_format=torch.contiguous_format)
        torch.mul(gate, gate, out=inner)
        inner.mul_(_C3).add_(_C1).mul_(gate).exp_().add_(1.0)
        torch.div(gate, inner, out=inner)
        torch.mul(inner, up, out=out)

    each(work, row_pieces(*whole.shape))
    return whole


def gelu_mul_encode(gate_up: Tensor, encoding: Encoding, pending: Tensor | None) -> Activation:
    """The kind `float` in the type of `gate_up`, nothing pending; ValueError otherwise."""
    if encoding.kind != "float" or encoding.dtype != gate_up.dtype or pending is not None:
        raise ValueError(f"the CPU has no activation of kind {encoding.kind} from {gate_up.dtype} to {encoding.dtype}")
    return gelu_mul(gate_up)
