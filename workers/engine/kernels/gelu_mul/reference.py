"""The tanh form of gelu (Hendrycks and Gimpel, 2016), times the second half."""

from torch import Tensor
from torch.nn import functional


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2·K] → gelu_tanh(gate) · up [T, K]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up
