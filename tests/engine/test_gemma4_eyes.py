"""The Gemma 4 comparison proves its eyes: with one mutation it misses its bound by a factor of 100."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.engine.mutations import CONFIG_MUTATIONS, MODEL_MUTATIONS, difference, load_model
from tests.engine.support import BOUND, engine_config, load_reference, random_jobs, reference_logprobs
from tests.support.tiny_gemma4 import make_tiny_gemma4
from workers.engine.engine import ScoringEngine
from workers.engine.kernels import rotary
from workers.engine.models import GemmaConfig, GemmaModel
from workers.engine.models.gemma_config import FULL, SLIDING

JOBS = random_jobs(11, 800, [90, 30], 4)


def _without_scalar(layer: int) -> Callable[[GemmaModel], None]:
    return lambda model: model.model.layers[layer].layer_scalar.data.fill_(1.0)


def _rotary(kind: str, **changes: float) -> Callable[[GemmaConfig], GemmaConfig]:
    return lambda c: replace(c, rotary=c.rotary | {kind: replace(c.rotary[kind], **changes)})


OWN_CONFIG_MUTATIONS = CONFIG_MUTATIONS | {
    "every pair turns": _rotary(FULL, turned=1.0),
    "sliding rope base": _rotary(SLIDING, theta=12_000.0),
    "no v norm": lambda c: replace(c, value_norm=False),
    "norms as 1 + w": lambda c: replace(c, norm_offset=1.0),
}
OWN_MODEL_MUTATIONS = MODEL_MUTATIONS | {f"no layer_scalar {i}": _without_scalar(i) for i in range(3)}
"""The last layer's scalar changes nothing: the final norm takes every factor out again."""


@pytest.fixture(scope="module")
def engine(tiny_gemma4: Path) -> ScoringEngine:
    return ScoringEngine.load(engine_config(tiny_gemma4))


@pytest.fixture(scope="module")
def expected(tiny_gemma4: Path) -> dict[Any, float]:
    return reference_logprobs(load_reference(tiny_gemma4), JOBS)


def test_the_unmutated_model_is_within_the_bound(tiny_gemma4: Path, expected: Any, engine: ScoringEngine) -> None:
    assert difference(JOBS, expected, load_model(tiny_gemma4), engine) < BOUND


@pytest.mark.parametrize("name", OWN_CONFIG_MUTATIONS)
def test_config_mutations_show(tiny_gemma4: Path, expected: Any, engine: ScoringEngine, name: str) -> None:
    model = load_model(tiny_gemma4, OWN_CONFIG_MUTATIONS[name])
    assert difference(JOBS, expected, model, engine) > 100 * BOUND


@pytest.mark.parametrize("name", OWN_MODEL_MUTATIONS)
def test_model_mutations_show(tiny_gemma4: Path, expected: Any, engine: ScoringEngine, name: str) -> None:
    model = load_model(tiny_gemma4)
    OWN_MODEL_MUTATIONS[name](model)
    assert difference(JOBS, expected, model, engine) > 100 * BOUND


def _values(change: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """The fused op with other values on the layers where K = V."""
    plain = rotary.cpu.qkv_norm_rotary

    def mutated(qkv: Tensor, layout: Any, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = plain(qkv, layout, *args)
        return q, k, change(k, v) if layout.shared_kv else v

    return mutated


VALUE_MUTATIONS = {
    "K = V after norm and rotation": lambda k, v: k,
    "K = V without the value": lambda k, v: v * 0.0,
}


@pytest.mark.parametrize("name", VALUE_MUTATIONS)
def test_value_mutations_show(
    tiny_gemma4: Path, expected: Any, engine: ScoringEngine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(rotary.cpu, "qkv_norm_rotary", _values(VALUE_MUTATIONS[name]))
    assert difference(JOBS, expected, load_model(tiny_gemma4), engine) > 100 * BOUND


def test_k_after_norm_before_rotation_shows(
    tiny_gemma4: Path, expected: Any, engine: ScoringEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """v is k_proj's output before the k norm, not after it: its weight would count."""
    plain = rotary.cpu.qkv_norm_rotary

    def mutated(qkv: Tensor, layout: Any, q_scale: Tensor, k_scale: Tensor, *args: Any) -> Any:
        q, k, v = plain(qkv, layout, q_scale, k_scale, *args)
        return q, k, v * k_scale if layout.shared_kv else v

    monkeypatch.setattr(rotary.cpu, "qkv_norm_rotary", mutated)
    assert difference(JOBS, expected, load_model(tiny_gemma4), engine) > 100 * BOUND


@pytest.fixture(scope="module")
def sliding_last(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """config.json lists the last layer as sliding. All layers have the same heads: its weights fit either way."""
    directory = tmp_path_factory.mktemp("sliding-last") / "snapshot"
    return make_tiny_gemma4(directory, num_hidden_layers=3, global_head_dim=8, attention_k_eq_v=False)


def test_a_last_layer_that_slides_as_listed_shows(sliding_last: Path) -> None:
    """The reference takes the last layer for full, whatever is listed: its window and its rotation differ."""
    engine = ScoringEngine.load(engine_config(sliding_last))
    expected = reference_logprobs(load_reference(sliding_last), JOBS)
    assert difference(JOBS, expected, load_model(sliding_last), engine) < BOUND
    listed = load_model(sliding_last, lambda c: replace(c, layer_types=(SLIDING, FULL, SLIDING)))
    assert difference(JOBS, expected, listed, engine) > 100 * BOUND
