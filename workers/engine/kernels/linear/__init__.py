"""linear: x [T, K] · weight [O, K]ᵀ → [T, O]."""

from torch import Tensor

from workers.engine.kernels.linear import cpu
from workers.engine.kernels.products import RowRule

__all__ = ["linear"]


def linear(x: Tensor, weight: Tensor, rule: RowRule) -> Tensor:
    """x [T, K] · weight [O, K]ᵀ → [T, O] of their type, summed in float32.

    T may be any number of rows: the op pads to the rule's step.
    """
    return cpu.linear(x, weight, rule)
