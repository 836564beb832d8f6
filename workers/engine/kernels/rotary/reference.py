"""Norm and rotation head by head, as in the formulas of RoFormer (Su et al., 2021) with pairs (i, i + D/2)."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from workers.engine.kernels.rms_norm.reference import rms_norm

if TYPE_CHECKING:
    from workers.engine.kernels.rotary import HeadLayout


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, D], cos and sin [T, D/2] → the rotated x [T, D]."""
    half = x.shape[-1] // 2
    first, second = x[:, :half], x[:, half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


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
    """The op of `kernels.rotary`: q [N, T, G, D], k and v [N, T+1, D]."""
    heads = qkv.view(qkv.shape[0], -1, layout.head_dim).unbind(1)
    n, h, g = layout.num_kv_heads, layout.num_heads, layout.group
    q = [rotate(rms_norm(x, q_scale, eps), cos, sin) for x in heads[:h]]
    k = [rotate(rms_norm(x, k_scale, eps), cos, sin) for x in heads[h : h + n]]
    values = heads[h : h + n] if layout.shared_kv else heads[h + n :]
    v = [rms_norm(x, torch.ones(layout.head_dim, device=x.device), eps) if norm_v else x for x in values]
    grouped = [torch.stack(q[i * g : (i + 1) * g], dim=1) for i in range(n)]
    zero_row = (0, 0, 0, 1)
    return torch.stack(grouped), pad(torch.stack(k), zero_row), pad(torch.stack(v), zero_row)


def rows_of(layout: "HeadLayout", q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What `qkv_norm_rotary` gave, in the layout of GPUs: q [T, H, D], k and v [T, N, D]."""
    q = q.transpose(0, 1).reshape(q.shape[1], layout.num_heads, layout.head_dim)
    return q, k[:, :-1].transpose(0, 1), v[:, :-1].transpose(0, 1)


def scaled(qkv: Tensor, layout: "HeadLayout", pending: Tensor) -> Tensor:
    """qkv [T, layout.width] with its parts multiplied by pending [parts]."""
    return torch.cat(
        [part * p for part, p in zip(torch.split(qkv, list(layout.parts), dim=1), pending, strict=True)], dim=1
    )
