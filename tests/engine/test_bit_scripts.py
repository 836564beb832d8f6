"""The scripts that compare bits and lengths on a full model see what they are there to see."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import stream_lengths
from benchmarks.engines import load_engine
from benchmarks.equal_bits import (
    Comparison,
    Seen,
    at_budget,
    digest,
    has_none_shared,
    has_shared,
    has_stored,
    read_alone,
    values_of,
)
from tests.engine.support import make_plan, random_jobs, score
from workers.engine.engine import ScoringEngine

JOBS = random_jobs(5, 800, [60, 25, 31], 4)
ALONE = {str(i): make_plan([job])[0] for i, job in enumerate(JOBS)}
TOGETHER = make_plan(JOBS[::-1])[0]


@pytest.fixture(scope="module")
def engine(tiny_gemma4: Path) -> Iterator[ScoringEngine]:
    found = load_engine(tiny_gemma4, device="cpu", warmup="none", token_budget=1024, max_tokens=4200)
    yield found
    found.close()


@pytest.fixture
def expected(engine: ScoringEngine) -> Any:
    return read_alone(engine, ALONE)


def test_a_value_is_known_by_its_path_wherever_it_stands(engine: ScoringEngine, expected: Any) -> None:
    found = values_of(TOGETHER, score(engine, TOGETHER).logprobs)
    assert found == expected
    assert len(found) == len(TOGETHER.cols)
    assert digest(found) == digest(dict(reversed(expected.items())))


def test_one_bit_shows(engine: ScoringEngine, expected: Any) -> None:
    comparison = Comparison(dict(expected))
    comparison.run("same", engine, {"all": TOGETHER})
    assert not comparison.faults
    key = next(iter(expected))
    comparison.expected[key] ^= 1
    comparison.run("one bit", engine, {"all": TOGETHER})
    assert comparison.faults == [f"one bit: of {len(expected)} values {len(expected)} are known, 1 differ"]
    assert digest(comparison.expected) != digest(expected)


def test_a_value_that_nothing_is_known_of_shows(engine: ScoringEngine, expected: Any) -> None:
    comparison = Comparison(expected)
    comparison.run("others", engine, {"all": make_plan(random_jobs(6, 800, [20], 2))[0]})
    assert len(comparison.faults) == 1


def test_what_passes_are_like_is_demanded(engine: ScoringEngine, expected: Any) -> None:
    def failed(engine: ScoringEngine, plans: Any, must: Any) -> bool:
        comparison = Comparison(expected)
        comparison.run("a", engine, plans, must=must)
        return bool(comparison.faults)

    assert not failed(engine, ALONE, has_shared)
    assert failed(engine, ALONE, has_none_shared)
    assert failed(engine, {"all": TOGETHER}, has_shared)
    assert failed(engine, {"all": TOGETHER}, has_stored)
    assert not failed(at_budget(engine, 100), {"all": TOGETHER}, has_stored)
    assert has_none_shared(Seen(passes=3))


def test_streams_are_judged(engine: ScoringEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_lengths, "compilers", list)
    streams = stream_lengths.make_streams(engine.info.vocab_size, 70)
    assert {(s.content, s.questions) for s in streams} >= {(1, 1), (1, 5000), (17, 5000)}
    assert max(s.content for s in streams) < 70
    runs = [stream_lengths.run(engine, streams[:1]) for _ in range(2)]
    values = [list(run[1]) for run in runs]
    assert stream_lengths.faults(engine, [[1.0], [1.04]], values, 0.05) == []
    assert "+10.0%" in stream_lengths.faults(engine, [[1.0], [1.1]], values, 0.05)[0]
    other = [values[0][0] + np.float32(1e-3)]
    assert "1 streams gave other bits" in stream_lengths.faults(engine, [[1.0], [1.0]], [values[0], other], 0.05)[0]
    monkeypatch.setattr(engine, "stats", lambda: {"late_compiles": 2})
    monkeypatch.setattr(stream_lengths, "compilers", lambda: ["torch._dynamo"])
    assert len(stream_lengths.faults(engine, [[1.0], [1.0]], values, 0.05)) == 2
