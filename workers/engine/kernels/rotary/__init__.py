"""rotary: from the fused projection to what attention reads: split heads, norms, rotary positions, layout."""

from dataclasses import dataclass

from torch import Tensor

from workers.engine.kernels import dispatch
from workers.engine.kernels.rotary import cpu

__all__ = ["HeadLayout", "qkv_norm_rotary", "rotary_table"]


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """How the fused projection splits into q, k, v: [T, (H + 2·N)·D], or [T, (H + N)·D] where k and v share theirs."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    shared_kv: bool = False

    @property
    def group(self) -> int:
        """Query heads that read one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def parts(self) -> tuple[int, ...]:
        """Columns of q, k and, unless it is shared, v in the fused projection."""
        kv = self.num_kv_heads * self.head_dim
        return (self.num_heads * self.head_dim, kv) if self.shared_kv else (self.num_heads * self.head_dim, kv, kv)

    @property
    def width(self) -> int:
        """Columns of the fused projection."""
        return sum(self.parts)


def rotary_table(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """positions [T] int64, inv_freq [D/2] float32 → cos and sin [T, D/2] of position · frequency, on any device."""
    return cpu.rotary_table(positions, inv_freq)


def qkv_norm_rotary(
    qkv: Tensor,
    layout: HeadLayout,
    q_scale: Tensor,
    k_scale: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    *,
    norm_v: bool = False,
    pending: Tensor | None = None,
    extra_rows: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [T, layout.width] → q, k, v of its type, as attention on its device reads them; all are contiguous.

                    q               k, v
        on a GPU    [T, H, D]       [T+E, N, D]    rows T and on (E = `extra_rows`) are left for the caller to fill
        on the CPU  [N, T, G, D]    [N, T+1, D]    row T is zero: it stands where an attention block has no token

    q and k are normalised over D with the scales [D] float32 and rotated by cos, sin [T, D/2] float32 (the two halves
    of D form the pairs: the transformers convention). v is the projection as it is, the key's before norm and rotation
    where they share it; with `norm_v` it is normalised over D without a scale. Head h of the projection is query h % G
    of key/value head h // G.

    pending: float32, a scale for each of `layout.parts` that the product before left to its reader; None for 1. On the
    CPU there is none, and no extra row (ValueError).
    """
    if dispatch.on_gpu(qkv):
        from workers.engine.kernels.rotary import kernel

        return kernel.qkv_norm_rotary(qkv, layout, q_scale, k_scale, cos, sin, eps, norm_v, pending, extra_rows)
    if pending is not None or extra_rows:
        raise ValueError("on the CPU nothing is pending, and keys have no extra rows")
    return cpu.qkv_norm_rotary(qkv, layout, q_scale, k_scale, cos, sin, eps, norm_v)
