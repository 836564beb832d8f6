"""gelu_mul: the gated activation gelu_tanh(gate) · up."""

from torch import Tensor

from workers.engine.kernels import dispatch
from workers.engine.kernels.encoding import Activation, Encoding
from workers.engine.kernels.gelu_mul import cpu

__all__ = ["gelu_mul", "gelu_mul_encode"]


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2·K], gate and up side by side → gelu_tanh(gate) · up [T, K] of its type. May overwrite its input."""
    return cpu.gelu_mul(gate_up)


def gelu_mul_encode(gate_up: Tensor, encoding: Encoding, pending: Tensor | None = None) -> Activation:
    """gate_up [T, 2·K] → gelu_tanh(gate · p₀) · (up · p₁) [T, K] in `encoding`, computed in float32.

    pending: p [2] float32, scales that the product before left to its reader; None for 1. On the CPU there are none,
    the kind is `float`, and its dtype that of `gate_up` (ValueError). May overwrite its input.
    """
    if dispatch.on_gpu(gate_up):
        from workers.engine.kernels.gelu_mul import kernel

        return kernel.gelu_mul_encode(gate_up, encoding, pending)
    return cpu.gelu_mul_encode(gate_up, encoding, pending)
