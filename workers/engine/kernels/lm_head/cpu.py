"""Chunks of fixed vocabulary width: product, largest value, sum of exponentials, the entries that fall in the chunk.

A chunk is computed by one thread, see `kernels.pieces`.

The chunks of a row are combined in vocabulary order, so a row's bits do not depend on how many rows share the call.
"""

import torch
from torch import Tensor

from workers.engine.kernels.lm_head import half
from workers.engine.kernels.lm_head.half import VOCAB_CHUNK
from workers.engine.kernels.pieces import each
from workers.engine.kernels.products import RowRule, linear_into, pad_rows

__all__ = ["VOCAB_CHUNK", "lm_head_logprobs"]

MAX_ROWS = 512  # rows of one sweep over the weight: bounds a chunk's logits at 8 MiB


def _log_sum_exp(maxima: Tensor, sums: Tensor) -> Tensor:
    """maxima, sums [R, chunks] → log Σ_chunks sums · exp(maxima) [R, 1]."""
    top = maxima.amax(dim=1, keepdim=True)
    return (sums * (maxima - top).exp_()).sum(dim=1, keepdim=True).log_().add_(top)


def _rows_logprobs(
    x: Tensor, weight: Tensor, rows: Tensor, cols: Tensor, softcap: float | None, rule: RowRule
) -> Tensor:
    """One sweep: x [R, K] with R a multiple of the rule's step; rows index x; cols ascending."""
    starts = range(0, weight.shape[0], VOCAB_CHUNK)
    maxima, sums = x.new_empty(2, x.shape[0], len(starts)).unbind(0)
    values = x.new_empty(rows.shape[0])
    bounds = torch.searchsorted(cols, torch.tensor([*starts, weight.shape[0]])).tolist()

    def work(chunk: int) -> None:
        start, here = starts[chunk], slice(bounds[chunk], bounds[chunk + 1])
        part = weight[start : start + VOCAB_CHUNK]
        logits = linear_into(x.new_empty(x.shape[0], part.shape[0]), x, part, rule)
        if softcap is not None:
            logits.div_(softcap).tanh_().mul_(softcap)
        values[here] = logits[rows[here], cols[here] - start]
        torch.amax(logits, dim=1, out=maxima[:, chunk])
        torch.sum(logits.sub_(maxima[:, chunk, None]).exp_(), dim=1, out=sums[:, chunk])

    each(work, range(len(starts)))
    return values - _log_sum_exp(maxima, sums)[rows, 0]


def lm_head_logprobs(
    x: Tensor, weight: Tensor, entry_rows: Tensor, entry_cols: Tensor, softcap: float | None, rule: RowRule
) -> Tensor:
    """The op of `kernels.lm_head`: [C] float32."""
    out = torch.empty(entry_rows.shape[0])
    sweep = _rows_logprobs if weight.dtype == torch.float32 else half.rows_logprobs
    x = x.to(weight.dtype)
    for first in range(0, x.shape[0], MAX_ROWS):
        entries = torch.nonzero((entry_rows >= first) & (entry_rows < first + MAX_ROWS)).squeeze(1)
        entries = entries[torch.argsort(entry_cols[entries], stable=True)]
        piece = pad_rows(x[first : first + MAX_ROWS], rule)
        cols = entry_cols[entries]
        out[entries] = sweep(piece, weight, entry_rows[entries] - first, cols, softcap, rule)
    return out
