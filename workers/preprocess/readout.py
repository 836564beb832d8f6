"""From the engine's log-probabilities to the numbers of a response: option sums, p, residual.

Every reduction runs in a fixed order over one prompt's own numbers, so a prompt's bits do not depend on what else the
request holds. Letters: N prompts, O options, S sequences of an option, L tokens of a sequence.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from spinf_serve.plan import F32, I64
from spinf_serve.protocol.errors import RequestError
from workers.preprocess.layout import Reads
from workers.preprocess.trie import Gather

F64 = npt.NDArray[np.float64]

_MAX_CHUNK = 1 << 20  # numbers gathered at once: bounds the scratch memory at a few times 8 MiB


@dataclass(frozen=True, slots=True)
class Scores:
    """One prompt: log-probability and p of each option, and the mass on none of them (never rounded)."""

    logprobs: list[float]  # [O]
    p: list[float]  # [O]
    residual: float


def read_scores(logprobs: F32, reads: Reads, gathers: Sequence[Gather], decimals: int | None = None) -> list[Scores]:
    """The scores of every prompt of `reads`, option numbers rounded to `decimals` if given.

    Raises `RequestError` engine_error for a number that is not finite.
    """
    scores: list[Scores | None] = [None] * len(reads.starts)
    for number, gather in enumerate(gathers):
        prompts = np.flatnonzero(reads.gathers == number)
        for part in _chunks(prompts, gather):
            values = option_logprobs(logprobs, reads.starts[part], gather)
            rows = zip(
                part.tolist(),
                rounded(values, decimals),
                rounded(softmax(values), decimals),
                residual(values).tolist(),
                strict=True,
            )
            for prompt, *row in rows:
                scores[prompt] = Scores(*row)
    return [score for score in scores if score is not None]


def _chunks(prompts: I64, gather: Gather) -> Iterator[I64]:
    size = max(1, _MAX_CHUNK // max(gather.index.size, gather.width + 2))
    for start in range(0, len(prompts), size):
        yield prompts[start : start + size]


def option_logprobs(logprobs: F32, starts: I64, gather: Gather) -> F64:
    """log P of each option, [N, O]: the chain rule along a sequence, log-sum-exp over an option's sequences."""
    block = np.zeros((len(starts), gather.width + 2))
    block[:, :-2] = logprobs[starts[:, None] + np.arange(gather.width)]
    block[:, -1] = -np.inf
    # NaN and infinity fail the comparison; minus infinity is a token that the model rules out.
    if not (block < np.inf).all():
        raise _not_finite()
    sums = block[:, gather.index[:, :, 0]]
    for token in range(1, gather.index.shape[2]):
        sums = sums + block[:, gather.index[:, :, token]]
    values = logsumexp(sums)
    if not np.isfinite(values).all():
        raise _not_finite()
    return values


def _not_finite() -> RequestError:
    return RequestError("engine_error", "the engine returned a number that is not finite")


def logsumexp(x: F64) -> F64:
    """log Σ exp over the last axis, added in order."""
    if x.shape[-1] == 1:
        return x[..., 0]
    top = x.max(axis=-1)
    total = np.zeros(top.shape)
    # An option that is impossible in every spelling stays at minus infinity instead of becoming NaN.
    shift = np.where(np.isneginf(top), 0.0, top)
    for s in range(x.shape[-1]):
        total += np.exp(np.ascontiguousarray(x[..., s]) - shift)
    with np.errstate(divide="ignore"):
        return np.asarray(shift + np.log(total))


def softmax(values: F64) -> F64:
    """p over the options of each row, [N, O]."""
    weights = np.exp(values - values.max(axis=1, keepdims=True))
    return np.asarray(weights / _row_sums(weights)[:, None])


def residual(values: F64) -> F64:
    """max(0, 1 - Σ exp(logprob)) of each row, [N]."""
    return np.maximum(0.0, 1.0 - _row_sums(np.exp(values)))


def _row_sums(x: F64) -> F64:
    # cumsum adds strictly from left to right; numpy's sum would pair terms up by the array's shape.
    return np.asarray(np.cumsum(x, axis=1)[:, -1])


def rounded(values: F64, decimals: int | None) -> Any:
    """`values` as nested lists, rounded if `decimals` is given, never -0.0."""
    return ((values if decimals is None else np.round(values, decimals)) + 0.0).tolist()
