"""tree_attention: every row of the pass attends to its own path through chains of K/V segments.

A row's bits depend on the keys, values and positions of its path alone: the path is reduced in blocks of fixed size by
path position (block = position // B), whatever the row's place in the stream, the other branches, the way a chain is
cut into segments, and whether a segment lies in this pass or in a store.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from workers.engine.kernels import dispatch
from workers.engine.kernels.encoding import Activation, Encoding
from workers.engine.kernels.products import RowRule
from workers.engine.kernels.tree_attention import cpu
from workers.engine.kernels.tree_attention.segments import Segments

if TYPE_CHECKING:
    from workers.engine.kernels.tree_attention.kernel import DevicePlan

__all__ = ["AttentionPlan", "Segments", "prepare", "tree_attention"]

type AttentionPlan = cpu.AttentionPlan | DevicePlan
"""Of the CPU: made by `prepare`. Of a GPU: made by `kernel.stage` and `kernel.on_device`."""


def prepare(
    segments: Segments, *, rows: int, group: int, windows: Sequence[int | None], rule: RowRule
) -> cpu.AttentionPlan:
    """Everything that the layers of one pass share: which rows run together, over which keys, under which mask.

    rows     rows of the pass (T)
    group    query heads on one key/value head (G)
    windows  the distinct windows of the model's layers (None: full)
    """
    return cpu.prepare(segments, rows=rows, group=group, windows=windows, rule=rule)


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    stores: Sequence[tuple[Tensor, Tensor]],
    plan: AttentionPlan,
    *,
    window: int | None,
    rule: RowRule,
    encoding: Encoding | None = None,
) -> Activation:
    """softmax(q · kᵀ) · v along each row's path → [T, H·D], heads as in the projection, as `encoding` wants it.

    On the CPU: q [N, T, G, D], already scaled; k, v [N, T+1, D], row T zero; of each store [N, L, D]. The result has
    their type.
    On a GPU: q [T, H, D]; k, v [T+E, N, D], of which the last E = plan.extra_rows are filled here from the stores; of
    each store [L, N, D].
    stores  this layer's (k, v) of each store that the plan's segments name
            q, k, v and the stores are of one type; sums and softmax are float32
    window  a row at position p sees the positions over p - window; None: all up to p
    Rows that belong to no segment (padding) get zeros.
    """
    if dispatch.on_gpu(q):
        from workers.engine.kernels.tree_attention import kernel  # needs Triton

        assert isinstance(plan, kernel.DevicePlan)
        assert encoding is not None
        return kernel.tree_attention(q, k, v, stores, plan, window=window, encoding=encoding)
    assert isinstance(plan, cpu.AttentionPlan)
    return cpu.tree_attention(q, k, v, stores, plan, window=window, rule=rule)
