"""embedding: rows of a table, scaled."""

from torch import Tensor

from workers.engine.kernels.embedding import cpu

__all__ = ["embedding"]


def embedding(tokens: Tensor, weight: Tensor, scale: float) -> Tensor:
    """tokens [T] int64, weight [V, K] → weight[tokens] · scale [T, K] float32, on any device."""
    return cpu.embedding(tokens, weight, scale)
