"""rms_norm: x / rms(x) · scale over the last dimension."""

from torch import Tensor

from workers.engine.kernels.rms_norm import cpu

__all__ = ["rms_norm"]


def rms_norm(x: Tensor, scale: Tensor | None, eps: float) -> Tensor:
    """x [..., K] → x · rsqrt(mean(x²) + eps) · scale [K]. `scale` is the whole factor: 1 + w where a family stores w.

    None: no factor.
    """
    return cpu.rms_norm(x, scale, eps)
