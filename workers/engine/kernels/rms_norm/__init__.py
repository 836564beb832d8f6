"""rms_norm: x / rms(x) · scale over the last dimension, alone, with the encoding and with the residual before it."""

import torch
from torch import Tensor

from workers.engine.kernels import dispatch
from workers.engine.kernels.encoding import Activation, Encoding
from workers.engine.kernels.rms_norm import cpu

__all__ = ["norm_encode", "residual_norm", "rms_norm"]


def rms_norm(x: Tensor, scale: Tensor | None, eps: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """x [..., K] → x · rsqrt(mean(x²) + eps) · scale [K], computed in float32 and rounded to `dtype` once.

    `scale` is the whole factor, float32: 1 + w where a family stores w. None: no factor.
    """
    if dispatch.on_gpu(x):
        from workers.engine.kernels.rms_norm import kernel

        rows = kernel.norm_encode(x.reshape(-1, x.shape[-1]), scale, eps, Encoding("float", dtype))
        assert isinstance(rows, Tensor)
        return rows.view(x.shape)
    return cpu.rms_norm(x, scale, eps, dtype)


def norm_encode(x: Tensor, scale: Tensor | None, eps: float, encoding: Encoding) -> Activation:
    """x [T, K] → `rms_norm` of its rows in `encoding`; on the CPU the kind `float` alone (ValueError)."""
    if dispatch.on_gpu(x):
        from workers.engine.kernels.rms_norm import kernel

        return kernel.norm_encode(x, scale, eps, encoding)
    return cpu.norm_encode(x, scale, eps, encoding)


def residual_norm(
    x: Tensor,
    h: Tensor,
    post_scale: Tensor,
    layer_scalar: Tensor | None,
    next_scale: Tensor,
    eps: float,
    encoding: Encoding,
) -> Activation:
    """The end of a block and the norm of the next one. x is updated in place:

        x ← (x + rms_norm(h) · post_scale) · layer_scalar        result: rms_norm(x) · next_scale in `encoding`

    x and h [T, K] float32 or bf16, post_scale and next_scale [K] float32, layer_scalar [1] float32 or None for 1. All
    in float32; a number is rounded once, when it is written, and the result is that of x as it was written. On the CPU
    the kind `float` and x in float32 alone (ValueError).
    """
    if dispatch.on_gpu(x):
        from workers.engine.kernels.rms_norm import kernel

        return kernel.residual_norm(x, h, post_scale, layer_scalar, next_scale, eps, encoding)
    return cpu.residual_norm(x, h, post_scale, layer_scalar, next_scale, eps, encoding)
