"""The tanh form of gelu (Hendrycks and Gimpel, 2016), times the second half."""

from torch import Tensor
from torch.nn import functional


def gelu_mul(gate_up: Tensor, pending: Tensor | None = None) -> Tensor:
    """gate_up [T, 2·K] → gelu_tanh(gate) · up [T, K]; pending [2] multiplies gate and up before."""
    gate, up = gate_up.chunk(2, dim=-1)
    if pending is not None:
        gate, up = gate * pending[0], up * pending[1]
    return functional.gelu(gate, approximate="tanh") * up
