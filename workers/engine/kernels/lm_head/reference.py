"""The whole distribution of every row, then the entries."""

import torch
from torch import Tensor


def lm_head_logprobs(
    x: Tensor, weight: Tensor, entry_rows: Tensor, entry_cols: Tensor, softcap: float | None
) -> Tensor:
    """The op of `kernels.lm_head`: [C] float32."""
    logits = x.to(weight.dtype).double() @ weight.double().t()
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return torch.log_softmax(logits, dim=-1)[entry_rows, entry_cols].float()
