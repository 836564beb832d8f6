"""Row by row: gather the path's keys and values, a plain softmax, a weighted sum. Float64 inside."""

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.engine.kernels.tree_attention.segments import Segments, chains, cut


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    stores: Sequence[tuple[Tensor, Tensor]],
    segments: Segments,
    *,
    window: int | None,
) -> Tensor:
    """The op of `kernels.tree_attention`, from the segments themselves: [T, H·D]."""
    n, t, g, d = q.shape
    sources = [(k, v), *stores]
    out = torch.zeros(t, n, g, d, dtype=q.dtype)
    for chain in chains(segments):
        for i in range(chain.rows):
            position = chain.position + i
            first = 0 if window is None else max(0, position - window + 1)
            pieces = cut(chain.path, first, position + 1)
            keys = torch.cat([sources[s][0][:, a : a + m] for s, a, m in pieces], dim=1).double()
            values = torch.cat([sources[s][1][:, a : a + m] for s, a, m in pieces], dim=1).double()
            weights = torch.softmax(q[:, chain.start + i].double() @ keys.transpose(1, 2), dim=-1)
            out[chain.start + i] = (weights @ values).to(q.dtype)
    return out.reshape(t, n * g * d)
