"""rotary: from the fused projection to what attention reads: split heads, norm of q and k, rotary positions, layout."""

from dataclasses import dataclass

from torch import Tensor

from workers.engine.kernels.rotary import cpu

__all__ = ["HeadLayout", "qk_norm_rotary", "rotary_table"]


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """How the fused projection [T, (H + 2·N)·D] splits into q, k and v."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        """Query heads that read one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def width(self) -> int:
        """Columns of the fused projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


def rotary_table(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """positions [T] int64, inv_freq [D/2] float32 → cos and sin [T, D/2] of position · frequency."""
    return cpu.rotary_table(positions, inv_freq)


def qk_norm_rotary(
    qkv: Tensor,
    layout: HeadLayout,
    q_scale: Tensor,
    k_scale: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [T, (H + 2·N)·D] → q [N, T, G, D], k [N, T+1, D], v [N, T+1, D].

    q and k are normalised over D with the scales [D] and rotated by cos, sin [T, D/2] (the two halves of D form the pairs:
    the transformers convention). Head h of the projection is query h % G of key/value head h // G. Row T of k and v is zero:
    it stands where an attention block has no token.
    """
    return cpu.qk_norm_rotary(qkv, layout, q_scale, k_scale, cos, sin, eps)
