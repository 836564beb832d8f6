"""The whole forward in bf16 on a GPU against transformers, on a random stack of the 12B's real layers and its head.

The truth is transformers in float32. What bf16 may change is derived, not measured: each tensor that our forward rounds
(`rounding.rounded_tensors`) is off by 2^-8 · 0.425 of its size, root mean square, element by element and independently;
what that does to the stream after a layer and to a log-probability is, to first order, the derivative of it. That gives
a standard deviation σ for each. `BAND`: errors are of that size, neither larger nor smaller (as they would be if there
were more or fewer roundings than are counted). `WORST`: no log-probability and no row is far out. And the error is
smaller than that of transformers in bf16, which rounds in more places (the stream itself, scores, tables, logits).
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.random_checkpoint import write_checkpoint
from benchmarks.shapes import FULL, MODELS, SLIDING, Json
from tests.engine.mutations import CONFIG_MUTATIONS, MODEL_MUTATIONS
from tests.engine.paths import (
    Deviation,
    Errors,
    TokenPath,
    copy_model,
    deviations,
    errors,
    our_paths,
    reference_paths,
    same,
)
from tests.engine.support import Job, Question
from tests.engine.test_gemma4_eyes import OWN_CONFIG_MUTATIONS as GEMMA4_CONFIG_MUTATIONS
from tests.engine.test_gemma4_eyes import VALUE_MUTATIONS
from workers.engine.kernels import embedding
from workers.engine.load import empty_model, materialize
from workers.engine.models import GemmaConfig, GemmaModel, model_config
from workers.engine.weights import load_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU"),
    pytest.mark.filterwarnings("default"),  # transformers and the first backward pass on a device may have some
]

BAND = (0.8, 1.25)
"""Root mean square of a stream's error in σ: over thousands of rows what is left is the error of the first order."""

FEW_BAND = (0.6, 1.4)
"""The same of the last layer, of which each path's last row alone exists, and of the log-probabilities, four a path.

A dozen rows, whose errors hang on the few keys that each head reads: their root mean square varies by a tenth or so.
"""

WORST = 5.0
"""σ that no log-probability and no row is off by: a normal variable is once in two million times.

A row's σ is that of its layer. Rows differ (one whose heads read few keys averages over fewer errors), but a row is
thousands of elements: among 1,600 rows of a narrower stack the worst was at 2.4.
"""

WIDE = 3.0
"""A mutation misses one of the bounds by this factor at least. In float32 it is 100: bf16 hides more.

The window is the least: one key more or less shows in the rows where some head gives that key its weight.
"""

LAYERS = (SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL)
CONTENTS = (2000, 40)
"""Tokens. The longer one is over the window: a thousand rows read up to its edge."""

QUESTIONS, OPTIONS = 6, 4


def stack(text: Json) -> Json:
    """The model's text part cut to `LAYERS`."""
    return text | {"num_hidden_layers": len(LAYERS), "layer_types": list(LAYERS)}


def some_jobs(vocab_size: int, contents: tuple[int, ...] = CONTENTS) -> list[Job]:
    """Random ids; options of one token each."""
    rng = np.random.default_rng(7)

    def draw(count: int) -> tuple[int, ...]:
        return tuple(rng.integers(20, vocab_size, count).tolist())

    def question(length: int) -> Question:
        return Question(draw(length), tuple((token,) for token in sorted(set(draw(OPTIONS)))))

    return [Job((2, *draw(n - 1)), tuple(question(3 + 4 * i) for i in range(QUESTIONS))) for n in contents]


def load_transformers(snapshot: Path, dtype: torch.dtype, device: str) -> Any:
    """transformers' model, plain attention."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(snapshot, dtype=dtype, attn_implementation="eager").eval().to(device)


def load_ours(snapshot: Path, device: str) -> GemmaModel:
    """Our model as `load` makes it in bf16."""
    model = empty_model(model_config(snapshot), "bf16")
    materialize(model, torch.device(device))
    load_weights(model, snapshot)
    return model


@dataclass(frozen=True)
class Facts:
    """What all tests compare with."""

    model: GemmaModel
    jobs: list[Job]
    truth: list[TokenPath]
    sigma: list[Deviation]
    theirs: Errors

    def errors(self, model: GemmaModel) -> Errors:
        return errors(our_paths(model, self.jobs), self.truth, self.sigma)


def make_facts(snapshot: Path, jobs: list[Job], device: str) -> Facts:
    """One reference at a time holds memory."""
    assert not torch.backends.cuda.matmul.allow_tf32
    started = time.perf_counter()
    reference = load_transformers(snapshot, torch.float32, device)
    loaded = time.perf_counter()
    truth, sigma = reference_paths(reference, jobs), deviations(reference, jobs)
    known = time.perf_counter()
    del reference
    reference = load_transformers(snapshot, torch.bfloat16, device)
    theirs = errors(reference_paths(reference, jobs), truth, sigma)
    del reference
    compared = time.perf_counter()
    model = load_ours(snapshot, device)
    print(
        f"\nfloat32 loaded in {loaded - started:.1f} s, truth and σ {known - loaded:.1f} s, transformers in bf16 "
        f"{compared - known:.1f} s, ours loaded {time.perf_counter() - compared:.1f} s"
    )
    return Facts(model, jobs, truth, sigma, theirs)


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Facts]:
    snapshot = tmp_path_factory.mktemp("stack") / "snapshot"
    shape = MODELS["gemma-4-12b"]
    text = stack(shape.text)
    started = time.perf_counter()
    write_checkpoint(snapshot, shape.model_type, text, quantized=False, text_only=True, device="cuda")
    print(f"\nwritten in {time.perf_counter() - started:.1f} s")
    found = make_facts(snapshot, some_jobs(text["vocab_size"]), "cuda")
    for file in snapshot.iterdir():
        file.unlink()
    yield found
    torch.cuda.empty_cache()


def table(name: str, found: Errors) -> str:
    """One line."""
    streams, rows = (" ".join(f"{value:7.2f}" for value in values) for values in (found.streams, found.rows))
    return f"{name:34} streams {streams} | worst row {rows} | log P rms {found.rms:7.2f} worst {found.worst:7.2f}"


def test_errors_are_what_the_roundings_explain(facts: Facts) -> None:
    ours = facts.errors(facts.model)
    print("\n" + table("ours, in σ", ours) + "\n" + table("transformers in bf16, in σ", facts.theirs))
    relative = [
        (sum(s.streams[i] ** 2 for s in facts.sigma) / sum(float(t.streams[i].square().sum()) for t in facts.truth))
        ** 0.5
        for i in range(len(LAYERS))
    ]
    print("σ of the stream, relative: " + " ".join(f"{value:.5f}" for value in relative))
    print(f"σ of log P: {torch.cat([s.logprobs for s in facts.sigma]).square().mean().sqrt():.4f}, mean")
    assert all(BAND[0] < value < BAND[1] for value in ours.streams[:-1])
    assert all(FEW_BAND[0] < value < FEW_BAND[1] for value in (ours.streams[-1], ours.rms))
    assert ours.worst < WORST
    assert max(ours.rows) < WORST


def test_no_further_off_than_transformers_in_bf16(facts: Facts) -> None:
    ours = facts.errors(facts.model)
    assert all(a < b for a, b in zip(ours.streams, facts.theirs.streams, strict=True))
    assert ours.rms < facts.theirs.rms


# The comparison proves its eyes


def margin(found: Errors) -> float:
    """By which factor the worst bound is missed."""
    few = max(found.streams[-1], found.rms) / FEW_BAND[1]
    return max(few, max(found.streams[:-1]) / BAND[1], found.worst / WORST, max(found.rows) / WORST)


def _without_weight(layer: int, name: str) -> Callable[[GemmaModel], None]:
    """A norm whose weight is forgotten."""
    return lambda model: model.model.layers[layer].get_submodule(name).weight.data.fill_(1.0)


def _final_norm(model: GemmaModel) -> None:
    model.model.norm.weight.data.fill_(float(model.model.norm.weight.mean()))


def _without_scalar(model: GemmaModel) -> None:
    """Of the layer whose scalar is furthest from 1: one near it changes little. The last one is seen by no score."""
    scalars = [layer.layer_scalar.data for layer in list(model.model.layers)[:-1]]
    max(scalars, key=lambda scalar: abs(float(scalar) - 1)).fill_(1.0)


def _without_scalars(model: GemmaModel) -> None:
    for layer in model.model.layers:
        layer.layer_scalar.data.fill_(1.0)


NORMS = ("input", "post_attention", "pre_feedforward", "post_feedforward")
WEIGHT_MUTATIONS: dict[str, Callable[[GemmaModel], None]] = {
    "order of the groups": MODEL_MUTATIONS["order of the groups"],
    "final norm without weight": _final_norm,
    **{f"{name} norm without weight": _without_weight(1, f"{name}_layernorm") for name in NORMS},
    **{f"{name} norm without weight": _without_weight(1, f"self_attn.{name}_norm") for name in "qk"},
    "no layer_scalar": _without_scalar,
    "no layer_scalar anywhere": _without_scalars,
}
CONFIGS: dict[str, Callable[[GemmaConfig], GemmaConfig]] = CONFIG_MUTATIONS | GEMMA4_CONFIG_MUTATIONS


def assert_shows(name: str, found: Errors) -> None:
    print("\n" + table(name, found) + f" | misses by {margin(found):.1f}")
    assert margin(found) > WIDE


def mutated(model: GemmaModel, change: Callable[[GemmaModel], None]) -> GemmaModel:
    """A copy with other weights."""
    copied = copy_model(model)
    change(copied)
    copied.loaded()
    return copied


@pytest.mark.parametrize("name", CONFIGS)
def test_config_mutations_show(facts: Facts, name: str) -> None:
    assert_shows(name, facts.errors(copy_model(facts.model, CONFIGS[name])))


@pytest.mark.parametrize("name", WEIGHT_MUTATIONS)
def test_weight_mutations_show(facts: Facts, name: str) -> None:
    assert_shows(name, facts.errors(mutated(facts.model, WEIGHT_MUTATIONS[name])))


def test_a_copy_without_a_mutation_has_the_same_bits(facts: Facts) -> None:
    first, second = (our_paths(model, facts.jobs) for model in (facts.model, copy_model(facts.model, same)))
    assert all(torch.equal(a.logprobs, b.logprobs) for a, b in zip(first, second, strict=True))


def values_of(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """The fused op with other values on the layers where K = V."""
    from workers.engine.kernels.rotary import kernel

    plain = kernel.qkv_norm_rotary

    def op(qkv: Tensor, layout: Any, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = plain(qkv, layout, *args)
        return q, k, change(k, v) if layout.shared_kv else v

    return op


@pytest.mark.parametrize("name", VALUE_MUTATIONS)
def test_value_mutations_show(facts: Facts, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    from workers.engine.kernels.rotary import kernel

    monkeypatch.setattr(kernel, "qkv_norm_rotary", values_of(VALUE_MUTATIONS[name]))
    assert_shows(name, facts.errors(facts.model))


def test_embedding_scale_shows(facts: Facts, monkeypatch: pytest.MonkeyPatch) -> None:
    scaled = partial(_scaled, embedding.cpu.embedding)
    monkeypatch.setattr(embedding.cpu, "embedding", scaled)
    assert_shows("embedding scale", facts.errors(facts.model))


def _scaled(plain: Callable[[Tensor, Tensor, float], Tensor], tokens: Tensor, weight: Tensor, scale: float) -> Tensor:
    return plain(tokens, weight, scale * 1.05)
