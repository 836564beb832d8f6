"""A square, a sum and two multiplications; the sum's order is set by K alone.

Some rows at a time, see `kernels.pieces`.
"""

import torch
from torch import Tensor

from workers.engine.kernels.encode.cpu import empty
from workers.engine.kernels.encoding import Activation, Encoding
from workers.engine.kernels.pieces import each, row_pieces


def rms_norm(x: Tensor, scale: Tensor | None, eps: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """x [..., K] · rsqrt(mean(x²) + eps) · scale [K]; x has at least two rows (one would be summed by all threads)."""
    x = x.float()
    normed = x.square()
    # The squares are summed pairwise: `vector_norm` would add them one after the other, at twice the error.
    inverse = normed.sum(dim=-1, keepdim=True).div_(x.shape[-1]).add_(eps).rsqrt_()
    torch.mul(x, inverse, out=normed)
    return (normed if scale is None else normed.mul_(scale)).to(dtype)


def norm_encode(x: Tensor, scale: Tensor | None, eps: float, encoding: Encoding) -> Activation:
    """The norm of rows x [T, K]."""
    out = empty(x.shape[0], x.shape[1], encoding)

    def work(rows: slice) -> None:
        out[rows] = rms_norm(x[rows], scale, eps)

    each(work, row_pieces(*x.shape))
    return out


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
    out = empty(x.shape[0], x.shape[1], encoding)

    def work(rows: slice) -> None:
        piece = x[rows].add_(rms_norm(h[rows], post_scale, eps))
        if layer_scalar is not None:
            piece.mul_(layer_scalar)
        out[rows] = rms_norm(piece, next_scale, eps)

    each(work, row_pieces(*x.shape))
    return out
