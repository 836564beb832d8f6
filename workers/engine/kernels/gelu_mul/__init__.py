"""gelu_mul: the gated activation gelu_tanh(gate) · up."""

from torch import Tensor

from workers.engine.kernels.gelu_mul import cpu

__all__ = ["gelu_mul"]


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2·K], gate and up side by side → gelu_tanh(gate) · up [T, K] of its type. May overwrite its input."""
    return cpu.gelu_mul(gate_up)
