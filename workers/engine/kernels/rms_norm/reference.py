"""Root mean square normalisation as its formula (Zhang and Sennrich, 2019)."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """x [..., K] · rsqrt(mean(x²) + eps) · scale [K]."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * scale
