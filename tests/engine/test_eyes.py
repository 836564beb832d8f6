"""The suite proves its eyes: with one mutation in the forward the comparison misses its bound by a factor of 100."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.support import (
    BOUND,
    engine_config,
    make_plan,
    option_logprobs,
    random_jobs,
    reference_logprobs,
    score,
    worst_difference,
)
from workers.engine.engine import ScoringEngine
from workers.engine.kernels import embedding
from workers.engine.kernels.products import RowRule
from workers.engine.models import GemmaModel, model_config
from workers.engine.models.gemma import FULL, SLIDING, GemmaConfig
from workers.engine.runner import Runner
from workers.engine.weights import load_weights

JOBS = random_jobs(11, 800, [90, 30], 4)

CONFIG_MUTATIONS: dict[str, Callable[[GemmaConfig], GemmaConfig]] = {
    "window+1": lambda c: replace(c, sliding_window=c.sliding_window + 1),
    "window-1": lambda c: replace(c, sliding_window=c.sliding_window - 1),
    "rope bases swapped": lambda c: replace(c, rotary={FULL: c.rotary[SLIDING], SLIDING: c.rotary[FULL]}),
    "soft-cap": lambda c: replace(c, final_softcap=30.0),
    "score scale": lambda c: replace(c, scaling=c.scaling * 1.1),
    "layer pattern shifted": lambda c: replace(c, layer_types=(FULL, *c.layer_types[:-1])),
}


class _Identity(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def _drop(name: str) -> Callable[[GemmaModel], None]:
    def mutate(model: GemmaModel) -> None:
        setattr(model.model.layers[1], name, _Identity())

    return mutate


def _flat_norm(name: str) -> Callable[[GemmaModel], None]:
    """q and k norms cannot be left out of the fused op; without their weight they still normalise."""

    def mutate(model: GemmaModel) -> None:
        attention = model.model.layers[1].self_attn
        getattr(attention, name).weight.data.zero_()
        model.loaded()

    return mutate


def _regroup(model: GemmaModel) -> None:
    """Query head h reads key/value head h % N in place of h // G."""
    layout = model.config.layout
    rows = layout.num_heads * layout.head_dim
    order = torch.arange(layout.num_heads).view(layout.num_kv_heads, layout.group).t().reshape(-1)
    for layer in model.model.layers:
        weight = layer.self_attn.qkv_proj.weight.data
        heads = weight[:rows].view(layout.num_heads, layout.head_dim, -1)
        weight[:rows] = heads[order].reshape(rows, -1)


MODEL_MUTATIONS: dict[str, Callable[[GemmaModel], None]] = {
    "no input norm": _drop("input_layernorm"),
    "no post-attention norm": _drop("post_attention_layernorm"),
    "no pre-feedforward norm": _drop("pre_feedforward_layernorm"),
    "no post-feedforward norm": _drop("post_feedforward_layernorm"),
    "no final norm": lambda model: setattr(model.model, "norm", _Identity()),
    "q norm without weight": _flat_norm("q_norm"),
    "k norm without weight": _flat_norm("k_norm"),
    "order of the groups": _regroup,
}


@pytest.fixture(scope="module")
def expected(reference: Any) -> dict[Any, float]:
    return reference_logprobs(reference, JOBS)


def _difference(snapshot: Path, expected: dict[Any, float], model: GemmaModel, engine: ScoringEngine) -> float:
    plan, where = make_plan(JOBS)
    mutated = ScoringEngine(engine_config(snapshot), Runner(model, RowRule()), engine.info)
    return worst_difference(option_logprobs(JOBS, score(mutated, plan).logprobs, where), expected)


def _load(snapshot: Path, mutate: Callable[[GemmaConfig], GemmaConfig] = lambda c: c) -> GemmaModel:
    model = GemmaModel(mutate(model_config(snapshot)))
    load_weights(model, snapshot)
    return model


def test_the_unmutated_model_is_within_the_bound(tiny_checkpoint: Path, expected: Any, engine: ScoringEngine) -> None:
    assert _difference(tiny_checkpoint, expected, _load(tiny_checkpoint), engine) < BOUND


@pytest.mark.parametrize("name", CONFIG_MUTATIONS)
def test_config_mutations_show(tiny_checkpoint: Path, expected: Any, engine: ScoringEngine, name: str) -> None:
    model = _load(tiny_checkpoint, CONFIG_MUTATIONS[name])
    assert _difference(tiny_checkpoint, expected, model, engine) > 100 * BOUND


@pytest.mark.parametrize("name", MODEL_MUTATIONS)
def test_model_mutations_show(tiny_checkpoint: Path, expected: Any, engine: ScoringEngine, name: str) -> None:
    model = _load(tiny_checkpoint)
    MODEL_MUTATIONS[name](model)
    assert _difference(tiny_checkpoint, expected, model, engine) > 100 * BOUND


def test_embedding_scale_shows(
    tiny_checkpoint: Path, expected: Any, engine: ScoringEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = embedding.cpu.embedding
    monkeypatch.setattr(embedding.cpu, "embedding", lambda tokens, weight, scale: plain(tokens, weight, scale * 1.05))
    assert _difference(tiny_checkpoint, expected, _load(tiny_checkpoint), engine) > 100 * BOUND
