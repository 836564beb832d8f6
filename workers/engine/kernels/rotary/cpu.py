"""All heads of some rows at a time, written straight into the layout that attention reads.

The table serves on a GPU too.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from workers.engine.kernels.pieces import each, row_pieces
from workers.engine.kernels.rms_norm.cpu import rms_norm

if TYPE_CHECKING:
    from workers.engine.kernels.rotary import HeadLayout


def rotary_table(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """positions [T] int64, inv_freq [D/2] float32 → cos, sin [T, D/2]."""
    angles = positions.to(torch.float32)[:, None] * inv_freq
    return angles.cos(), angles.sin()


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
    t, d, half = qkv.shape[0], layout.head_dim, layout.head_dim // 2
    n, h, g = layout.num_kv_heads, layout.num_heads, layout.group
    heads = qkv.view(t, -1, d)
    scale = torch.cat((q_scale.expand(h, d), k_scale.expand(n, d)))
    cos, sin = cos[:, None], sin[:, None]
    q = qkv.new_empty(n, t, g, d)
    k, v = qkv.new_empty(2, n, t + 1, d).unbind(0)
    k[:, t], v[:, t] = 0.0, 0.0
    by_row = q.permute(1, 0, 2, 3), k.transpose(0, 1), v.transpose(0, 1)

    def work(rows: slice) -> None:
        to_q, to_k, to_v = (out[rows] for out in by_row)
        first, second = rms_norm(heads[rows, : h + n], scale, eps).chunk(2, dim=-1)
        for out, combine, a, b in (
            (slice(half), torch.sub, first * cos[rows], second * sin[rows]),
            (slice(half, d), torch.add, second * cos[rows], first * sin[rows]),
        ):
            combine(a[:, :h].view(-1, n, g, half), b[:, :h].view(-1, n, g, half), out=to_q[..., out])
            combine(a[:, h:], b[:, h:], out=to_k[..., out])
        values = heads[rows, -n:]
        to_v.copy_(rms_norm(values, None, eps) if norm_v else values)

    each(work, row_pieces(t, qkv.shape[1]))
    return q, k, v
