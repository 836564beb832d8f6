"""The product as its definition, in float64: what a row should be, up to float32 rounding."""

import torch
from torch import Tensor


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K] · weight [O, K]ᵀ → [T, O]."""
    return torch.einsum("tk,ok->to", x.double(), weight.double()).float()
