"""The suite proves its eyes: with one mutation in the forward the comparison misses its bound by a factor of 100."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.mutations import CONFIG_MUTATIONS, MODEL_MUTATIONS, difference, load_model
from tests.engine.support import (
    BOUND,
    random_jobs,
    reference_logprobs,
)
from workers.engine.engine import ScoringEngine
from workers.engine.kernels import embedding
from workers.engine.models import GemmaConfig
from workers.engine.models.gemma_config import FULL

JOBS = random_jobs(11, 800, [90, 30], 4)


def _layer_pattern_shifted(config: GemmaConfig) -> GemmaConfig:
    """All layers of Gemma 3 have the same heads, so their types can be moved."""
    return replace(config, layer_types=(FULL, *config.layer_types[:-1]))


OWN_CONFIG_MUTATIONS = CONFIG_MUTATIONS | {"layer pattern shifted": _layer_pattern_shifted}


@pytest.fixture(scope="module")
def expected(reference: Any) -> dict[Any, float]:
    return reference_logprobs(reference, JOBS)


def test_the_unmutated_model_is_within_the_bound(tiny_checkpoint: Path, expected: Any, engine: ScoringEngine) -> None:
    assert difference(JOBS, expected, load_model(tiny_checkpoint), engine) < BOUND


@pytest.mark.parametrize("name", OWN_CONFIG_MUTATIONS)
def test_config_mutations_show(tiny_checkpoint: Path, expected: Any, engine: ScoringEngine, name: str) -> None:
    model = load_model(tiny_checkpoint, OWN_CONFIG_MUTATIONS[name])
    assert difference(JOBS, expected, model, engine) > 100 * BOUND


@pytest.mark.parametrize("name", MODEL_MUTATIONS)
def test_model_mutations_show(tiny_checkpoint: Path, expected: Any, engine: ScoringEngine, name: str) -> None:
    model = load_model(tiny_checkpoint)
    MODEL_MUTATIONS[name](model)
    assert difference(JOBS, expected, model, engine) > 100 * BOUND


def test_embedding_scale_shows(
    tiny_checkpoint: Path, expected: Any, engine: ScoringEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = embedding.cpu.embedding
    monkeypatch.setattr(embedding.cpu, "embedding", lambda tokens, weight, scale: plain(tokens, weight, scale * 1.05))
    assert difference(JOBS, expected, load_model(tiny_checkpoint), engine) > 100 * BOUND
