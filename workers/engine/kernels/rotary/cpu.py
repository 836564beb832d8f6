"""Whole heads at once, written straight into the layout that attention reads. The table serves on a GPU too."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from workers.engine.kernels.rms_norm.cpu import rms_norm

if TYPE_CHECKING:
    from workers.engine.kernels.rotary import HeadLayout


def rotary_table(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """positions [T] int64, inv_freq [D/2] float32 → cos, sin [T, D/2]."""
    angles = positions.to(torch.float32)[:, None] * inv_freq
    return angles.cos(), angles.sin()


def _rotate_into(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """out, x [..., T, heads, D]; cos, sin [T, 1, D/2]. Computed in float32; out may be of another type."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    torch.sub(first * cos, second * sin, out=out[..., :half])
    torch.add(second * cos, first * sin, out=out[..., half:])


def qkv_norm_rotary(
    qkv: Tensor,
    layout: "HeadLayout",
    q_scale: Tensor,
    k_scale: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    norm_v: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The op of `kernels.rotary`: q [N, T, G, D], k and v [N, T+1, D] with a zero row T."""
    t, d = qkv.shape[0], layout.head_dim
    n, h, g = layout.num_kv_heads, layout.num_heads, layout.group
    heads = qkv.view(t, -1, d)
    cos, sin = cos[:, None], sin[:, None]
    q = qkv.new_empty(n, t, g, d)
    k, v = qkv.new_empty(2, n, t + 1, d).unbind(0)
    k[:, t], v[:, t] = 0.0, 0.0
    _rotate_into(
        q.permute(1, 0, 2, 3), rms_norm(heads[:, :h], q_scale, eps).view(t, n, g, d), cos[:, None], sin[:, None]
    )
    _rotate_into(k[:, :t].transpose(0, 1), rms_norm(heads[:, h : h + n], k_scale, eps), cos, sin)
    values = heads[:, -n:]
    v[:, :t].transpose(0, 1).copy_(rms_norm(values, None, eps) if norm_v else values)
    return q, k, v
