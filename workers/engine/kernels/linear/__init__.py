"""linear: x [T, K] · weight [O, K]ᵀ → [T, O], of numbers as they are or of a scheme's codes."""

import torch
from torch import Tensor

from workers.engine.kernels import dispatch
from workers.engine.kernels.encoding import Activation, Codes
from workers.engine.kernels.linear import cpu, library
from workers.engine.kernels.products import RowRule

__all__ = ["coded_linear", "linear"]


def linear(x: Tensor, weight: Tensor, rule: RowRule) -> Tensor:
    """x [T, K] · weight [O, K]ᵀ → [T, O] of their type, summed in float32. On CUDA the type is bf16.

    T may be any number of rows: the op pads to the rule's step.
    """
    if dispatch.on_gpu(x):
        from workers.engine.kernels.linear import kernel

        return kernel.linear(x, weight)
    return cpu.linear(x, weight, rule)


def coded_linear(x: Activation, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """x [T, K] · weight [O, K]ᵀ · the scale of x · weight_scale → bf16 [T, O], for any T.

    weight        e4m3 or int8 codes
    weight_scale  float32 [O], or [1] where x has a single scale too
    x             codes of the weight's type; for int8 weights also plain bf16
    """
    if weight.dtype == torch.float8_e4m3fn:
        assert isinstance(x, Codes)
        return library.scaled_product(x.values, weight, x.scale, weight_scale)
    from workers.engine.kernels.linear import kernel

    if isinstance(x, Codes):
        return kernel.linear(x.values, weight, x.scale, weight_scale)
    return kernel.linear(x, weight, None, weight_scale)
