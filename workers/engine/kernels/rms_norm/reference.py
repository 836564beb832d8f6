"""Root mean square normalisation as its formula (Zhang and Sennrich, 2019)."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """x [..., K] · rsqrt(mean(x²) + eps) · scale [K]."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * scale


def residual_norm(
    x: Tensor, h: Tensor, post_scale: Tensor, layer_scalar: Tensor | None, next_scale: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(the new x, what `encode` gets from it), both [T, K]."""
    x = x + rms_norm(h, post_scale, eps)
    if layer_scalar is not None:
        x = x * layer_scalar
    return x, rms_norm(x, next_scale, eps)
