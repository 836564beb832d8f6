"""lm_head: log-probabilities of chosen vocabulary entries, never a [R, V] tensor."""

from torch import Tensor

from workers.engine.kernels import dispatch
from workers.engine.kernels.lm_head import cpu
from workers.engine.kernels.products import RowRule

__all__ = ["lm_head_logprobs"]


def lm_head_logprobs(
    x: Tensor, weight: Tensor, entry_rows: Tensor, entry_cols: Tensor, softcap: float | None, rule: RowRule
) -> Tensor:
    """log softmax(cap(x · weightᵀ)) at the entries → [C] float32.

    x [R, K] float32, rounded to the type of weight [V, K] (on CUDA: bf16); entry c reads row entry_rows[c] at
    vocabulary id entry_cols[c] (both [C] int64); cap(z) = softcap · tanh(z / softcap), the identity for None.
    """
    if dispatch.on_gpu(weight):
        from workers.engine.kernels.lm_head import kernel

        return kernel.lm_head_logprobs(x, weight, entry_rows, entry_cols, softcap)
    return cpu.lm_head_logprobs(x, weight, entry_rows, entry_cols, softcap, rule)
