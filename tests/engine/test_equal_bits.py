"""A plan's log-probabilities are the same bits alone, packed, reversed, split, with other requests, on one thread.

Of each family and in each scheme of the CPU.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from spinf_serve.plan import F32
from tests.engine.support import Job, Tokens, drain, engine_config, make_plan, random_jobs, run_all, score
from workers.engine.engine import ScoringEngine

VOCAB = 800
JOBS = random_jobs(21, VOCAB, [100, 1, 63, 64, 65, 37], 5)

Values = dict[tuple[Tokens, Tokens, int], int]


def bits(jobs: Sequence[Job], logprobs: F32) -> Values:
    """(content, path, token) → the float's bits: comparable between plans that hold the jobs differently."""
    _, where = make_plan(jobs)
    raw = logprobs.view(np.int32)
    return {(jobs[job].content, path, token): int(raw[i]) for (job, path, token), i in where.items()}


def score_bits(engine: ScoringEngine, jobs: Sequence[Job]) -> Values:
    return bits(jobs, score(engine, make_plan(jobs)[0]).logprobs)


Load = Callable[..., ScoringEngine]


@pytest.fixture(scope="module", params=["gemma3-f32", "gemma4-f32", "gemma3-bf16", "gemma4-bf16"])
def load(request: pytest.FixtureRequest) -> Load:
    """Loads a tiny checkpoint of a family in a scheme."""
    family, quant = request.param.split("-")
    snapshot: Path = request.getfixturevalue({"gemma3": "tiny_checkpoint", "gemma4": "tiny_gemma4"}[family])
    return lambda **settings: ScoringEngine.load(engine_config(snapshot, quant=quant, **settings))


@pytest.fixture(scope="module")
def engine(load: Load) -> Iterator[ScoringEngine]:
    engine = load()
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def alone(engine: ScoringEngine) -> Values:
    """Each job in a call of its own."""
    values: Values = {}
    for job in JOBS:
        values |= score_bits(engine, [job])
    assert all(np.isfinite(np.array(list(values.values()), np.int32).view(np.float32)))
    return values


def test_packed(engine: ScoringEngine, alone: Values) -> None:
    assert score_bits(engine, JOBS) == alone


def test_reversed(engine: ScoringEngine, alone: Values) -> None:
    jobs = [Job(job.content, job.questions[::-1]) for job in JOBS[::-1]]
    assert score_bits(engine, jobs) == alone


def test_repeated(engine: ScoringEngine, alone: Values) -> None:
    assert score_bits(engine, JOBS) == score_bits(engine, JOBS) == alone


def test_with_other_requests_in_flight(engine: ScoringEngine, alone: Values) -> None:
    others = random_jobs(22, VOCAB, [50, 90, 3], 9)
    plans = {"a": make_plan(others)[0], "ours": make_plan(JOBS)[0], "b": make_plan(others[::-1])[0]}
    result = run_all(engine, plans)["ours"].result
    assert result is not None
    assert result.shared_pass
    assert bits(JOBS, result.logprobs) == alone


def test_with_and_without_other_questions(engine: ScoringEngine, alone: Values) -> None:
    """Other branches of the same trie: questions that share beginnings with ours, and one far longer."""
    extra = random_jobs(23, VOCAB, [2] * len(JOBS), 30, longest=120)
    jobs = [Job(job.content, more.questions + job.questions) for job, more in zip(JOBS, extra, strict=True)]
    values = score_bits(engine, jobs)
    assert {key: values[key] for key in alone} == alone


def test_each_question_alone(engine: ScoringEngine, alone: Values) -> None:
    values: Values = {}
    for job in JOBS[:3]:
        for question in job.questions:
            values |= score_bits(engine, [Job(job.content, (question,))])
    assert values == {key: alone[key] for key in values}


@pytest.mark.parametrize("budget", [30, 64, 100, 250, 700])
def test_other_token_budgets(load: Load, alone: Values, budget: int) -> None:
    """Splits at every kind of place: stored contents, replayed beginnings, contents over the budget."""
    engine = load(token_budget=budget, max_tokens=300)
    assert score_bits(engine, JOBS) == alone
    assert not engine.stats()["stored_bytes"]


@pytest.mark.parametrize("threads", [1, 3])
def test_other_thread_counts(engine: ScoringEngine, alone: Values, threads: int) -> None:
    torch.set_num_threads(threads)
    assert score_bits(engine, JOBS) == alone


def test_a_fresh_engine(load: Load, alone: Values) -> None:
    assert score_bits(load(), JOBS) == alone


def test_question_moved_to_another_place_of_a_long_content(engine: ScoringEngine) -> None:
    """The same path reached as content and as question: where the content ends does not matter either."""
    job = JOBS[0]
    whole = score_bits(engine, [job])
    cut = Job(job.content[:70], tuple(type(q)((*job.content[70:], *q.prompt), q.options) for q in job.questions))
    shifted = score_bits(engine, [cut])
    moved = {(job.content, path[30:], token): value for (_, path, token), value in shifted.items() if len(path) >= 30}
    assert moved == whole


def test_many_requests_with_small_passes(load: Load, alone: Values) -> None:
    """Six requests share passes of 120 tokens: each is cut at places that depend on the others."""
    engine = load(token_budget=120, max_tokens=300)
    for i, job in enumerate(JOBS):
        engine.submit(i, make_plan([job])[0])
    values: Values = {}
    for completion in drain(engine):
        assert completion.result is not None
        values |= bits([JOBS[completion.key]], completion.result.logprobs)
    assert values == alone
