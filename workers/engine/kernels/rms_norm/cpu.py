"""A square, a sum and two multiplications; the sum's order is set by K alone."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, scale: Tensor | None, eps: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """x [..., K] · rsqrt(mean(x²) + eps) · scale [K]; x has at least two rows (one would be summed by all threads)."""
    x = x.float()
    # The squares are summed pairwise: `vector_norm` would add them one after the other, at twice the error.
    inverse = x.square().sum(dim=-1, keepdim=True).div_(x.shape[-1]).add_(eps).rsqrt_()
    normed = x * inverse
    return (normed if scale is None else normed.mul_(scale)).to(dtype)
