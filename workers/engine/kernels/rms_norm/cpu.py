"""A square, a sum and two multiplications; the sum's order is set by K alone."""

import torch
from torch import Tensor

from workers.engine.kernels.encode.cpu import encode
from workers.engine.kernels.encoding import Activation, Encoding


def rms_norm(x: Tensor, scale: Tensor | None, eps: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """x [..., K] · rsqrt(mean(x²) + eps) · scale [K]; x has at least two rows (one would be summed by all threads)."""
    x = x.float()
    # The squares are summed pairwise: `vector_norm` would add them one after the other, at twice the error.
    inverse = x.square().sum(dim=-1, keepdim=True).div_(x.shape[-1]).add_(eps).rsqrt_()
    normed = x * inverse
    return (normed if scale is None else normed.mul_(scale)).to(dtype)


def norm_encode(x: Tensor, scale: Tensor | None, eps: float, encoding: Encoding) -> Activation:
    """The norm of rows x [T, K]."""
    return encode(rms_norm(x, scale, eps), encoding)


def residual_norm(
    x: Tensor,
    h: Tensor,
    post_scale: Tensor,
    layer_scalar: Tensor | None,
    next_scale: Tensor,
    eps: float,
    encoding: Encoding,
) -> Activation:
    """The op of `kernels.rms_norm`, op by op."""
    x.add_(rms_norm(h, post_scale, eps))
    if layer_scalar is not None:
        x.mul_(layer_scalar)
    return norm_encode(x, next_scale, eps, encoding)
