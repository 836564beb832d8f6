"""Gemma 4 against transformers' plain forward over the full string, in every form that a checkpoint comes in."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.support import (
    BOUND,
    Job,
    Question,
    engine_config,
    load_reference,
    make_plan,
    option_logprobs,
    random_jobs,
    reference_logprobs,
    score,
    worst_difference,
)
from tests.support.tiny_gemma4 import FORMS, make_tiny_gemma4
from workers.engine.engine import ScoringEngine

VOCAB = 800
JOBS = random_jobs(31, VOCAB, [130, 20], 3)


def our_scores(snapshot: Path, jobs: list[Job], **settings: Any) -> dict[Any, float]:
    plan, where = make_plan(jobs)
    engine = ScoringEngine.load(engine_config(snapshot, **settings))
    return option_logprobs(jobs, score(engine, plan).logprobs, where)


@pytest.fixture(scope="module")
def reference4(tiny_gemma4: Path) -> Any:
    return load_reference(tiny_gemma4)


@pytest.fixture(scope="module")
def expected(reference4: Any) -> dict[Any, float]:
    return reference_logprobs(reference4, JOBS)


def _draw(seed: int, count: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(20, VOCAB, count).tolist())


def _content_of_5000_tokens() -> list[Job]:
    """Far over the window, and over the engine's budget: a pass by itself."""
    return [Job((2, *_draw(5, 4999)), (Question(_draw(1, 8), (_draw(2, 1), _draw(3, 3))),))]


def _branches(count: int) -> list[Job]:
    questions = tuple(Question(_draw(100 + i, 1 + i % 7), (_draw(1000 + i, 1 + i % 3),)) for i in range(count))
    return [Job((2, *_draw(6, 69)), questions)]


CASES = {
    "content over the window": lambda: random_jobs(6, VOCAB, [150, 64, 63, 65, 1], 3),
    "300 branches": lambda: _branches(300),
}


@pytest.mark.parametrize("name", CASES)
def test_scores_equal_the_reference(tiny_gemma4: Path, reference4: Any, name: str) -> None:
    jobs = CASES[name]()
    assert worst_difference(our_scores(tiny_gemma4, jobs), reference_logprobs(reference4, jobs)) < BOUND


def test_a_content_of_5000_tokens_equals_the_reference(tiny_gemma4: Path) -> None:
    """The reference's plain attention would take half a minute for it: here it uses torch's own."""
    reference = load_reference(tiny_gemma4)
    reference.set_attn_implementation("sdpa")
    jobs = _content_of_5000_tokens()
    assert worst_difference(our_scores(tiny_gemma4, jobs), reference_logprobs(reference, jobs)) < BOUND


@pytest.mark.parametrize("budget", [256, 64])
def test_split_jobs_equal_the_reference(tiny_gemma4: Path, expected: dict[Any, float], budget: int) -> None:
    ours = our_scores(tiny_gemma4, JOBS, token_budget=budget, max_tokens=200)
    assert worst_difference(ours, expected) < BOUND


@pytest.mark.parametrize("spelling", ["global", "per_layer"])
@pytest.mark.parametrize("model_type", FORMS)
def test_every_form_holds_the_same_model(
    tmp_path: Path, expected: dict[Any, float], model_type: str, spelling: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The weights are those of `tiny_gemma4`: the scores too, and the reference reads the form as we do."""
    snapshot = make_tiny_gemma4(tmp_path / "snapshot", model_type=model_type, spelling=spelling)
    with caplog.at_level(logging.INFO):
        ours = our_scores(snapshot, JOBS)
    assert worst_difference(ours, expected) < BOUND
    assert ("weights are not read: media are not served" in caplog.text) == (model_type in ("gemma4", "gemma4_unified"))
    theirs = reference_logprobs(load_reference(snapshot), JOBS[:1])
    assert worst_difference({key: ours[key] for key in theirs}, theirs) < BOUND


@pytest.mark.parametrize("model_type", FORMS)
def test_a_checkpoint_saved_by_transformers(tmp_path: Path, model_type: str) -> None:
    source = make_tiny_gemma4(tmp_path / "source", model_type=model_type)
    load_reference(source).save_pretrained(tmp_path / "saved")
    assert '"per_layer_config"' in (tmp_path / "saved/config.json").read_text()
    assert our_scores(tmp_path / "saved", JOBS) == our_scores(source, JOBS)


VARIANTS: dict[str, dict[str, Any]] = {
    "own values on full layers": {"attention_k_eq_v": False},
    "K = V with all key/value heads": {"num_global_key_value_heads": None},
    "K = V with two of four": {"num_attention_heads": 8, "num_key_value_heads": 4, "num_global_key_value_heads": 2},
    "equal head sizes": {"global_head_dim": 8},
    "odd sizes": {"hidden_size": 72, "intermediate_size": 88, "head_dim": 12, "global_head_dim": 20},
    "no soft-cap": {"final_logit_softcapping": None},
    "window over a block": {"sliding_window": 100},
    "large epsilon": {"rms_norm_eps": 1e-2},
    "every pair turns": {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "proportional", "rope_theta": 1_000_000.0},
        }
    },
    "scaled rope": {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0},
            "full_attention": {
                "rope_type": "proportional",
                "factor": 8.0,
                "partial_rotary_factor": 0.5,
                "rope_theta": 1_000_000.0,
            },
        }
    },
    "default rope": {"rope_parameters": None},
    "vision attends both ways": {"use_bidirectional_attention": "vision"},
    "all full": {"layer_types": ["full_attention"] * 4},
    "last layer sliding, taken for full": {"layer_types": ["full_attention", "sliding_attention"] * 2},
    "five to one": {"layer_types": None, "num_hidden_layers": 7},
    "shards": {"shards": 3},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_config_variants_equal_the_reference(tmp_path: Path, variant: str) -> None:
    snapshot = make_tiny_gemma4(tmp_path / "snapshot", seed=3, **VARIANTS[variant])
    jobs = random_jobs(8, VOCAB, [130, 20], 2)
    assert worst_difference(our_scores(snapshot, jobs), reference_logprobs(load_reference(snapshot), jobs)) < BOUND
