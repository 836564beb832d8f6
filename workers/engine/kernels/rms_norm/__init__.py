"""rms_norm: x / rms(x) · scale over the last dimension."""

import torch
from torch import Tensor

from workers.engine.kernels.rms_norm import cpu

__all__ = ["rms_norm"]


def rms_norm(x: Tensor, scale: Tensor | None, eps: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """x [..., K] → x · rsqrt(mean(x²) + eps) · scale [K], computed in float32 and rounded to `dtype` once.

    `scale` is the whole factor, float32: 1 + w where a family stores w. None: no factor.
    """
    return cpu.rms_norm(x, scale, eps, dtype)
