"""Single faults in a loaded model's forward, for the tests that prove their eyes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.engine.support import Job, make_plan, option_logprobs, score, worst_difference
from workers.engine.engine import ScoringEngine
from workers.engine.kernels.products import RowRule
from workers.engine.kernels.rotary import HeadLayout
from workers.engine.layers.norm import RMSNorm
from workers.engine.models import GemmaConfig, GemmaModel, model_config
from workers.engine.models.gemma_config import FULL, SLIDING
from workers.engine.runner import Runner
from workers.engine.weights import load_weights

LAYER = 1
"""The layer that loses one of its parts."""


def load_model(
    snapshot: Path, mutate: Callable[[GemmaConfig], GemmaConfig] = lambda c: c, dtype: torch.dtype = torch.float32
) -> GemmaModel:
    """A model with its weights; `mutate` changes what it takes config.json for."""
    model = GemmaModel(mutate(model_config(snapshot)), dtype)
    load_weights(model, snapshot)
    return model


def difference(jobs: Sequence[Job], expected: dict[Any, float], model: GemmaModel, engine: ScoringEngine) -> float:
    """How far a model's option scores are from the expected ones; `engine` lends its settings."""
    plan, where = make_plan(jobs)
    mutated = ScoringEngine(engine.config, Runner(model, RowRule()), engine.info)
    return worst_difference(option_logprobs(jobs, score(mutated, plan).logprobs, where), expected)


def _pass_through(norm: RMSNorm) -> None:
    """Make a norm give what it gets, also inside a fused op: against so large an epsilon no x counts."""
    norm.eps = 1e12
    norm.weight.data.fill_(1e6 - norm.offset)
    norm.loaded()


def _drop(name: str) -> Callable[[GemmaModel], None]:
    return lambda model: _pass_through(getattr(model.model.layers[LAYER], name))


def _flat_norm(name: str) -> Callable[[GemmaModel], None]:
    """q and k norms cannot be left out of the fused op; without their weight they still normalise."""

    def mutate(model: GemmaModel) -> None:
        norm = getattr(model.model.layers[LAYER].self_attn, name)
        norm.weight.data.fill_(1.0 - norm.offset)
        model.loaded()

    return mutate


def _regroup(model: GemmaModel) -> None:
    """Query head h reads key/value head h % N in place of h // G."""
    for i, layer in enumerate(model.model.layers):
        layout: HeadLayout = model.config.layout(i)
        if layout.shared_kv:
            continue
        rows = layout.num_heads * layout.head_dim
        order = torch.arange(layout.num_heads).view(layout.num_kv_heads, layout.group).t().reshape(-1)
        weight = layer.self_attn.qkv_proj.weight.data
        heads = weight[:rows].view(layout.num_heads, layout.head_dim, -1)
        weight[:rows] = heads[order].reshape(rows, -1)


CONFIG_MUTATIONS: dict[str, Callable[[GemmaConfig], GemmaConfig]] = {
    "window+1": lambda c: replace(c, sliding_window=c.sliding_window + 1),
    "window-1": lambda c: replace(c, sliding_window=c.sliding_window - 1),
    "rope bases swapped": lambda c: replace(
        c,
        rotary={
            FULL: replace(c.rotary[FULL], theta=c.rotary[SLIDING].theta),
            SLIDING: replace(c.rotary[SLIDING], theta=c.rotary[FULL].theta),
        },
    ),
    "soft-cap": lambda c: replace(c, final_softcap=None if c.final_softcap else 30.0),
    "score scale": lambda c: replace(c, scaling=c.scaling * 1.1),
}

MODEL_MUTATIONS: dict[str, Callable[[GemmaModel], None]] = {
    "no input norm": _drop("input_layernorm"),
    "no post-attention norm": _drop("post_attention_layernorm"),
    "no pre-feedforward norm": _drop("pre_feedforward_layernorm"),
    "no post-feedforward norm": _drop("post_feedforward_layernorm"),
    "no final norm": lambda model: _pass_through(model.model.norm),
    "q norm without weight": _flat_norm("q_norm"),
    "k norm without weight": _flat_norm("k_norm"),
    "order of the groups": _regroup,
}
