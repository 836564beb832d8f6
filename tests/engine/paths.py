"""Streams and log-probabilities along paths, ours from one shared pass and the reference's from each path alone.

What separates two models that round differently is told by the stream after each layer, not by the scores alone: a
fault that only one row of a thousand meets is large in that row.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.engine.rounding import RMS, rounded_tensors
from tests.engine.support import Job, make_plan
from workers.engine.cuda_runner import CudaRunner
from workers.engine.kernels.products import RowRule
from workers.engine.models import GemmaConfig, GemmaModel
from workers.engine.packing import PlanCursor, Share, build_pass


@dataclass(frozen=True)
class TokenPath:
    """A content with one prompt. streams[i]: after layer i [L, K]; of the last layer the path's last row alone [1, K].

    logprobs: of the question's options of one token each, float64.
    """

    streams: list[Tensor]
    logprobs: Tensor


@dataclass(frozen=True)
class Deviation:
    """What bf16 may change on a path: σ of the stream after each layer (of its norm), and of each log-probability."""

    streams: list[float]
    logprobs: Tensor


def paths(jobs: Sequence[Job]) -> Iterator[tuple[int, tuple[int, ...], list[int]]]:
    """(job, token ids, options) of every question."""
    for number, job in enumerate(jobs):
        for question in job.questions:
            yield number, (*job.content, *question.prompt), [option[0] for option in question.options]


def our_paths(model: GemmaModel, jobs: Sequence[Job]) -> list[TokenPath]:
    """All jobs in one pass through the GPU's ops."""
    plan, where = make_plan(jobs)
    size = len(plan.tokens)
    pieces = PlanCursor(plan, size, size).take_all(size)
    packed = build_pass([Share("paths", plan, piece) for piece in pieces])
    assert np.array_equal(packed.tokens, plan.tokens)  # rows of the pass are indices of the plan
    runner = CudaRunner(model, RowRule())
    with _kept(model.model.layers, lambda out: out[0].clone()) as streams:
        staged = runner.stage(packed)
        values = runner.forward(staged).double().cpu()  # waits: until then the device reads what is staged
    logprobs = torch.empty_like(values)
    logprobs[torch.from_numpy(packed.targets)] = values
    found = []
    for number, ids, options in paths(jobs):
        prompt = ids[len(jobs[number].content) :]
        entries = [where[number, prompt, option] for option in options]
        read = int(np.searchsorted(plan.col_offsets, entries[0], side="right")) - 1
        rows = _ancestors(plan.parents, int(plan.read_rows[read]))
        assert tuple(plan.tokens[rows].tolist()) == ids
        at = torch.tensor(rows, device=streams[0].device)
        of_path = [*(stream[at] for stream in streams[:-1]), streams[-1][read : read + 1]]
        found.append(TokenPath(of_path, logprobs[entries]))
    return found


def _ancestors(parents: np.ndarray, row: int) -> list[int]:
    rows = []
    while row >= 0:
        rows.append(row)
        row = int(parents[row])
    return rows[::-1]


@torch.inference_mode()
def reference_paths(model: Any, jobs: Sequence[Job]) -> list[TokenPath]:
    """transformers' model on every path by itself, plain attention."""
    found = []
    for _, ids, options in paths(jobs):
        with _kept(model.model.layers, lambda out: out[0].float()) as streams:
            logits = _logits(model, ids)
        found.append(
            TokenPath([*streams[:-1], streams[-1][-1:]], torch.log_softmax(logits.double(), -1).cpu()[options])
        )
    return found


def deviations(model: Any, jobs: Sequence[Job]) -> list[Deviation]:
    """σ on every path (see `rounding`), from transformers' float32 model.

    The stream after a layer has many elements. A random direction r ~ N(0, 1) over all of them asks for all at once:
    the mean of (r · δx)² is the mean of |δx|².
    """
    found = []
    for _, ids, options in paths(jobs):
        with (
            torch.enable_grad(),
            rounded_tensors(model, weights=True) as tensors,
            _kept(model.model.layers, lambda out: out[0]) as streams,
        ):
            row = torch.log_softmax(_logits(model, ids), -1)
            outputs = [*streams[:-1], streams[-1][-1:], *(row[option] for option in options)]
            generator = torch.Generator(row.device).manual_seed(0)
            sigmas = [_sigma(output, tensors, generator) for output in outputs]
        found.append(Deviation(sigmas[: len(streams)], torch.tensor(sigmas[len(streams) :], dtype=torch.float64)))
    return found


def _sigma(output: Tensor, tensors: list[Tensor], generator: torch.Generator) -> float:
    """σ of a number, or of the norm of a tensor."""
    along = torch.randn(output.shape, generator=generator, device=output.device) if output.dim() else None
    grads = torch.autograd.grad(output, tensors, along, retain_graph=True, allow_unused=True)
    pairs = zip(grads, tensors, strict=True)
    effects = [(grad * tensor.detach()).double().square().sum() for grad, tensor in pairs if grad is not None]
    return RMS * math.sqrt(float(torch.stack(effects).sum()))


def _logits(model: Any, ids: Sequence[int]) -> Tensor:
    out: Tensor = model(torch.tensor([ids], device=model.device), logits_to_keep=1, use_cache=False).logits[0, -1]
    return out


@contextmanager
def _kept(layers: Any, take: Any) -> Iterator[list[Tensor]]:
    """What `take` makes of each layer's result, while this lasts."""
    kept: list[Tensor] = []
    hooks = [layer.register_forward_hook(lambda _module, _inputs, out: kept.append(take(out))) for layer in layers]
    yield kept
    for hook in hooks:
        hook.remove()


def same(config: GemmaConfig) -> GemmaConfig:
    """No change."""
    return config


def copy_model(model: GemmaModel, change: Any = same) -> GemmaModel:
    """A loaded bf16 model once more, in memory of its own; `change` changes what it takes config.json for."""
    with torch.device("meta"):
        copied = GemmaModel(change(model.config), torch.bfloat16)
    copied.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)
    copied.loaded()
    return copied


@dataclass(frozen=True)
class Errors:
    """Distances from the truth in units of what bf16 may change.

    streams   root mean square of the stream after each layer over all paths, in σ
    rows      the worst row's relative distance, in σ of its layer (relative too)
    logprobs  every log-probability, in σ
    """

    streams: list[float]
    rows: list[float]
    logprobs: Tensor

    @property
    def rms(self) -> float:
        """Of the log-probabilities."""
        return float(self.logprobs.square().mean().sqrt())

    @property
    def worst(self) -> float:
        """The log-probability that is furthest off."""
        return float(self.logprobs.abs().max())


def errors(found: Sequence[TokenPath], truth: Sequence[TokenPath], sigma: Sequence[Deviation]) -> Errors:
    """How far `found` is from the truth."""
    streams, rows = [], []
    for layer in range(len(truth[0].streams)):
        pairs = [(a.streams[layer], b.streams[layer]) for a, b in zip(found, truth, strict=True)]
        squares = sum(float((a - b).double().square().sum()) for a, b in pairs)
        size = sum(float(b.double().square().sum()) for _, b in pairs)
        expected = sum(one.streams[layer] ** 2 for one in sigma)
        streams.append(math.sqrt(squares / expected))
        worst = max(float(((a - b).norm(dim=1) / b.norm(dim=1)).max()) for a, b in pairs)
        rows.append(worst / math.sqrt(expected / size))
    scores = [(a.logprobs - b.logprobs) / s.logprobs for a, b, s in zip(found, truth, sigma, strict=True)]
    return Errors(streams, rows, torch.cat(scores))
