"""gelu_tanh(x) = x · (1 + tanh(u)) / 2 = x / (1 + exp(-2u)), u = √(2/π) · (x + 0.044715·x³), spelled with ops that
round each element alike wherever it stands. For x far below zero exp overflows to infinity and the value is a right
zero.
"""

import math

import torch
from torch import Tensor

_C1 = -2.0 * math.sqrt(2.0 / math.pi)
_C3 = _C1 * 0.044715


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2·K] → gelu_tanh(gate) · up [T, K]."""
    gate, up = gate_up.chunk(2, dim=-1)
    out = gate * gate
    out.mul_(_C3).add_(_C1).mul_(gate).exp_().add_(1.0)
    return torch.div(gate, out, out=out).mul_(up)
