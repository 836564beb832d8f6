"""Grouped-query self-attention over trees, with norms over each head and rotary positions."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from workers.engine.kernels.encoding import Activation
from workers.engine.kernels.rotary import HeadLayout, qkv_norm_rotary
from workers.engine.kernels.tree_attention import tree_attention
from workers.engine.layers.forward import Forward
from workers.engine.layers.linear import Linear
from workers.engine.layers.norm import RMSNorm

Rotary = tuple[Tensor, Tensor]
"""cos and sin [T, D/2] of the pass's positions."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One layer's attention: head layout, score scale, norms (see `models.gemma_config`), window (None: full), type."""

    layout: HeadLayout
    scaling: float
    eps: float
    norm_offset: float
    value_norm: bool
    window: int | None
    dtype: torch.dtype


class TreeSelfAttention(nn.Module):
    """x [T, K] → what the heads read [T, H·D], as `o_proj` wants it: the caller applies it to the rows that go on."""

    q_scale: Tensor

    def __init__(self, hidden: int, shape: AttentionShape, index: int) -> None:
        super().__init__()
        self.shape, self.index = shape, index
        layout = shape.layout
        if layout.shared_kv:
            self.qk_proj = Linear(hidden, *layout.parts, dtype=shape.dtype)
        else:
            self.qkv_proj = Linear(hidden, *layout.parts, dtype=shape.dtype)
        self.o_proj = Linear(layout.num_heads * layout.head_dim, hidden, dtype=shape.dtype)
        self.q_norm = RMSNorm(layout.head_dim, shape.eps, shape.norm_offset)
        self.k_norm = RMSNorm(layout.head_dim, shape.eps, shape.norm_offset)

    @property
    def projection(self) -> Linear:
        """What makes q, k and, unless it is shared, v."""
        return self.qk_proj if self.shape.layout.shared_kv else self.qkv_proj

    def loaded(self) -> None:
        """Folds the score scale into the q norm: exact where it is a power of two, as for head sizes 16, 64 and 256."""
        self.q_scale = (self.q_norm.offset + self.q_norm.weight) * self.shape.scaling

    def forward(self, x: Activation, rotary: Rotary, fwd: Forward) -> Activation:
        shape, layout, plan = self.shape, self.shape.layout, fwd.attention[self.shape.layout]
        projection = self.projection
        q, k, v = qkv_norm_rotary(
            projection(x, fwd.rule),
            layout,
            self.q_scale,
            self.k_norm.scale,
            *rotary,
            shape.eps,
            norm_v=shape.value_norm,
            pending=projection.pending,
            extra_rows=plan.extra_rows,
        )
        for capture in fwd.captures:
            capture.store.keep(self.index, k, v, capture.start)
        stores = [store.layers[self.index] for store in fwd.stores]
        return tree_attention(q, k, v, stores, plan, window=shape.window, rule=fwd.rule, encoding=self.o_proj.encoding)
