"""The head in bf16: one library product over the vocabulary, and float32 logits where they count.

The library rounds every logit of its product to bf16, which moves a log-sum-exp by little where many terms share it and
by up to 2^-8 of the largest logit where one term is nearly all of it. So the largest logit of every 1,024 is computed
again in float32, and so is every entry that is read.
"""

import torch
from torch import Tensor

from workers.engine.kernels.products import RowRule, linear_into

VOCAB_CHUNK = 4096
EXACT_EVERY = 1024  # vocabulary ids of which the largest logit is exact
_STEP = 512  # exact logits computed at a time: what they need stays in the cache


def exact_logits(x: Tensor, weight: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
    """x [R, K], weight [V, K] → x[rows] · weight[cols] over K, [C] float32."""
    if len(rows) % _STEP == 1:  # a single row would be summed by all threads
        return exact_logits(x, weight, *(torch.cat((t, t[-1:])) for t in (rows, cols)))[:-1]
    out, x = torch.empty(len(rows)), x.float()
    for r, c, part in zip(*(torch.split(t, _STEP) for t in (rows, cols, out)), strict=True):
        torch.sum(x.index_select(0, r).mul_(weight.index_select(0, c).float()), dim=1, out=part)
    return out


def _cap(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def rows_logprobs(
    x: Tensor, weight: Tensor, rows: Tensor, cols: Tensor, softcap: float | None, rule: RowRule
) -> Tensor:
    """One sweep: x [R, K] bf16 with R a multiple of the rule's step; rows index x → [C] float32."""
    count = x.shape[0]
    groups = -(-weight.shape[0] // EXACT_EVERY)
    maxima, sums = torch.empty(2, count, groups).unbind(0)
    largest = torch.empty(count, groups, dtype=torch.int64)
    buffer = x.new_empty(count * VOCAB_CHUNK)
    for start in range(0, weight.shape[0], VOCAB_CHUNK):
        part = weight[start : start + VOCAB_CHUNK]
        logits = linear_into(buffer[: count * part.shape[0]].view(count, -1), x, part, rule)
        capped = _cap(logits.float(), softcap)
        for first in range(0, part.shape[0], EXACT_EVERY):
            group = (start + first) // EXACT_EVERY
            terms = capped[:, first : first + EXACT_EVERY]
            maxima[:, group], where = terms.max(dim=1)
            largest[:, group] = where + (start + first)
            torch.sum(terms.sub_(maxima[:, group, None]).exp_(), dim=1, out=sums[:, group])
    every_row = torch.arange(count).repeat_interleave(groups)
    exact = _cap(exact_logits(x, weight, every_row, largest.view(-1)), softcap).view(count, groups)
    sums += exact.sub(maxima).exp_().sub_(1.0)  # the largest term stood in the sum as exp(0)
    top = maxima.amax(dim=1, keepdim=True)
    total = (sums * (maxima - top).exp_()).sum(dim=1).log_().add_(top[:, 0])
    return _cap(exact_logits(x, weight, rows, cols), softcap) - total[rows]
