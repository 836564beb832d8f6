"""Every option's log-probability against transformers' plain forward over the full string."""

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
from tests.support.tiny import make_tiny_checkpoint
from workers.engine.engine import ScoringEngine

VOCAB = 800


def _one_option() -> list[Job]:
    return [Job((2, 30, 31, 32), (Question((40, 41), ((50,),)),))]


def _nested_options() -> list[Job]:
    options = ((50,), (50, 51), (50, 51, 52), (50, 51, 52, 53), (60,), (60, 51))
    return [Job((2, *range(30, 60)), (Question((40, 41, 42), options), Question((40, 41), options)))]


def _shuffled_options() -> list[Job]:
    options = ((60, 51), (50, 51, 52), (60,), (50,), (50, 51, 52, 53), (50, 51))
    return [Job((2, *range(30, 60)), (Question((40, 41, 42), options),))]


def _option_right_after_the_content() -> list[Job]:
    return [Job((2, *range(30, 55)), (Question((), ((50,), (51, 52))), Question((50,), ((53,),))))]


def _many_branches() -> list[Job]:
    return random_jobs(5, VOCAB, [70], 110, longest=6)


def _content_over_the_window() -> list[Job]:
    return random_jobs(6, VOCAB, [150, 64, 63, 65, 1], 3)


def _long_questions() -> list[Job]:
    """Chains over several attention blocks, with forks far below the content."""
    rng = np.random.default_rng(3)
    stem = tuple(rng.integers(20, VOCAB, 150).tolist())
    endings = [tuple(rng.integers(20, VOCAB, 2).tolist()) for _ in range(12)]
    questions = [Question(stem, tuple((*ending, 30) for ending in endings)), Question(stem[:100], ((31, 32), (33,)))]
    return [Job((2, *range(30, 70)), tuple(questions))]


CASES = [
    _one_option,
    _nested_options,
    _shuffled_options,
    _option_right_after_the_content,
    _many_branches,
    _content_over_the_window,
    _long_questions,
]


@pytest.mark.parametrize("make_jobs", CASES, ids=lambda f: f.__name__.strip("_"))
def test_scores_equal_the_reference(engine: ScoringEngine, reference: Any, make_jobs: Any) -> None:
    jobs = make_jobs()
    plan, where = make_plan(jobs)
    ours = option_logprobs(jobs, score(engine, plan).logprobs, where)
    assert worst_difference(ours, reference_logprobs(reference, jobs)) < BOUND


@pytest.mark.parametrize("budget", [256, 64])
def test_split_jobs_equal_the_reference(tiny_checkpoint: Path, reference: Any, budget: int) -> None:
    """Jobs over several passes: at 64 the contents over the budget have a pass to themselves."""
    jobs = random_jobs(7, VOCAB, [40, 130, 5], 12)
    plan, where = make_plan(jobs)
    engine = ScoringEngine.load(engine_config(tiny_checkpoint, token_budget=budget, max_tokens=200))
    result = score(engine, plan)
    assert result.passes > 2
    assert worst_difference(option_logprobs(jobs, result.logprobs, where), reference_logprobs(reference, jobs)) < BOUND


VARIANTS: dict[str, dict[str, Any]] = {
    "one-kv-head": {"kv_heads": 1},
    "no-grouping": {"kv_heads": 4},
    "three-heads-on-one": {"heads": 3, "kv_heads": 1, "hidden_size": 96},
    "soft-cap": {"final_logit_softcapping": 9.0},
    "attention-soft-cap-is-ignored": {"attn_logit_softcapping": 5.0},
    "scaled-rope": {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
        }
    },
    "odd-score-scale": {"query_pre_attn_scalar": 24},
    "odd-sizes": {"hidden_size": 72, "intermediate_size": 88, "head_dim": 24},
    "window-over-a-block": {"window": 100},
    "all-full": {"layer_types": ["full_attention"] * 3},
    "all-sliding": {"layer_types": ["sliding_attention"] * 3},
    "shards": {"shards": 3},
    "large-epsilon": {"rms_norm_eps": 1e-2},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_config_variants_equal_the_reference(tmp_path: Path, variant: str) -> None:
    snapshot = make_tiny_checkpoint(tmp_path / "snapshot", seed=3, **VARIANTS[variant])
    jobs = random_jobs(8, VOCAB, [130, 20], 3)
    plan, where = make_plan(jobs)
    ours = option_logprobs(jobs, score(ScoringEngine.load(engine_config(snapshot)), plan).logprobs, where)
    assert worst_difference(ours, reference_logprobs(load_reference(snapshot), jobs)) < BOUND
