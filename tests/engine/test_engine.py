"""`ScoringEngine` as its callers see it: completions, cancellation, failures, times, counters."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spinf_serve.plan import ScorePlan
from spinf_serve.protocol.errors import RequestError
from spinf_serve.turns import Turns
from tests.engine.support import drain, engine_config, make_plan, random_jobs, run_all, score
from workers.engine import engine as engine_module
from workers.engine import load
from workers.engine.engine import ScoringEngine
from workers.engine.errors import LoadError
from workers.engine.kernels.products import RowRule
from workers.engine.runner import Runner, StagedPass

VOCAB = 800


@pytest.fixture
def small_passes(tiny_checkpoint: Path) -> Iterator[ScoringEngine]:
    """An engine whose passes hold 100 tokens."""
    engine = ScoringEngine.load(engine_config(tiny_checkpoint, token_budget=100, max_tokens=300))
    yield engine
    engine.close()


def a_plan(seed: int = 1, content: int = 40, questions: int = 4) -> ScorePlan:
    return make_plan(random_jobs(seed, VOCAB, [content], questions))[0]


def poison(monkeypatch: pytest.MonkeyPatch, plan: ScorePlan, error: Exception) -> None:
    """Make every pass that holds `plan` raise."""
    run = Runner.run

    def poisoned(self: Runner, staged: StagedPass) -> Any:
        if any(share.plan is plan for share in staged.packed.shares):
            raise error
        return run(self, staged)

    monkeypatch.setattr(Runner, "run", poisoned)


def test_idle_engine(engine: ScoringEngine) -> None:
    assert not engine.has_work
    assert engine.step() == []


def test_each_key_gets_one_completion(engine: ScoringEngine) -> None:
    plans = {("worker", str(i)): a_plan(i) for i in range(5)}
    for key, plan in plans.items():
        engine.submit(key, plan)
    completions = list(drain(engine))
    assert sorted(c.key for c in completions) == sorted(plans)
    assert all((c.result is None) != (c.error is None) for c in completions)


def test_result_counts_and_times(engine: ScoringEngine) -> None:
    plan = a_plan()
    result = score(engine, plan)
    assert result.packed_tokens == len(plan.tokens)
    assert result.passes == 1
    assert not result.shared_pass
    assert result.fingerprint == engine.info.fingerprint
    assert 0 <= result.queue_ms < 60_000
    assert 0 < result.busy_ms <= result.score_ms * 1.001


def test_a_shared_pass_is_shared_by_real_tokens(engine: ScoringEngine) -> None:
    plans = {"a": a_plan(1), "b": a_plan(2, 90, 9)}
    results = {key: c.result for key, c in run_all(engine, plans).items()}
    a, b = results["a"], results["b"]
    assert a is not None
    assert b is not None
    assert a.shared_pass
    assert b.shared_pass
    assert a.score_ms == b.score_ms
    assert a.busy_ms + b.busy_ms == pytest.approx(a.score_ms)
    assert a.busy_ms / b.busy_ms == pytest.approx(len(plans["a"].tokens) / len(plans["b"].tokens))


def test_a_plan_without_jobs(engine: ScoringEngine) -> None:
    plan = make_plan([])[0]
    result = score(engine, plan)
    assert result.logprobs.shape == (0,)
    assert result.passes == 0


def test_key_in_use(small_passes: ScoringEngine) -> None:
    small_passes.submit("a", a_plan())
    with pytest.raises(ValueError, match="in use"):
        small_passes.submit("a", a_plan())


def _malformed() -> dict[str, ScorePlan]:
    good = a_plan()
    tokens, parents, prefix = good.tokens.copy(), good.parents.copy(), good.prefix_lens.copy()
    tokens[3], parents[5], prefix[0] = 10**6, -1, 0
    far = good.parents.copy()
    far[-1] = len(good.tokens)
    return {
        "token outside the vocabulary": replace(good, tokens=tokens),
        "negative token": replace(good, tokens=-good.tokens),
        "column outside the vocabulary": replace(good, cols=good.cols + 10**6),
        "parent outside the job": replace(good, parents=parents),
        "parent after its child": replace(good, parents=far),
        "no content": replace(good, prefix_lens=prefix),
        "read row outside": replace(good, read_rows=good.read_rows + len(good.tokens)),
        "read rows descending": replace(good, read_rows=good.read_rows[::-1].copy()),
        "offsets short": replace(good, job_offsets=good.job_offsets - np.array([0, 1])),
        "columns short": replace(good, col_offsets=good.col_offsets[:-1]),
    }


@pytest.mark.parametrize("name", _malformed())
def test_malformed_plans_are_refused_at_the_door(engine: ScoringEngine, name: str) -> None:
    with pytest.raises(RequestError) as caught:
        engine.submit("bad", _malformed()[name])
    assert caught.value.code == "engine_error"
    assert not engine.has_work


def test_a_path_over_max_tokens_is_refused(small_passes: ScoringEngine) -> None:
    with pytest.raises(RequestError) as caught:
        small_passes.submit("long", a_plan(1, 299, 2))
    assert caught.value.code == "content_too_long"
    score(small_passes, a_plan(1, 250, 20))  # many tokens, but no path is too long


def test_cancelled_before_its_first_pass(engine: ScoringEngine) -> None:
    before = engine.stats()["packed_tokens"]
    engine.submit("gone", a_plan())
    engine.cancel("gone")
    engine.cancel("gone")
    engine.cancel("never seen")
    assert not engine.has_work
    assert engine.step() == []
    assert engine.stats()["packed_tokens"] == before


def test_cancelled_between_passes_frees_its_store(small_passes: ScoringEngine) -> None:
    engine = small_passes
    engine.submit("gone", a_plan(1, 60, 40))
    engine.submit("stays", a_plan(2, 20, 10))
    assert engine.step() == []
    assert engine.stats()["stored_bytes"]
    engine.cancel("gone")
    assert [c.key for c in drain(engine)] == ["stays"]
    assert not engine.stats()["stored_bytes"]
    assert not engine.has_work


def test_a_key_may_come_back_after_its_cancellation(small_passes: ScoringEngine) -> None:
    engine, plan = small_passes, a_plan(3, 60, 40)
    expected = score(engine, plan)
    engine.submit("again", a_plan(4, 60, 40))
    engine.step()
    engine.cancel("again")
    engine.submit("again", plan)
    (completion,) = drain(engine)
    assert completion.result is not None
    assert np.array_equal(completion.result.logprobs, expected.logprobs)
    assert completion.result.packed_tokens == expected.packed_tokens  # none of them the cancelled plan's


def test_one_plans_exception_fails_that_plan_alone(engine: ScoringEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = {"a": a_plan(1), "bad": a_plan(2), "b": a_plan(3)}
    expected = {key: score(engine, plans[key]).logprobs for key in "ab"}
    poison(monkeypatch, plans["bad"], ZeroDivisionError("in a kernel"))
    completions = run_all(engine, plans)
    error = completions["bad"].error
    assert isinstance(error, RequestError)
    assert error.code == "engine_error"
    assert "kernel" not in error.message
    for key in "ab":
        result = completions[key].result
        assert result is not None
        assert np.array_equal(result.logprobs, expected[key])


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")],
    ids=["MemoryError", "allocator"],
)
def test_out_of_memory_is_request_too_large(
    small_passes: ScoringEngine, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    engine, large = small_passes, a_plan(2, 60, 40)
    with monkeypatch.context() as patch:
        poison(patch, large, error)
        completions = run_all(engine, {"large": large, "small": a_plan(1)})
    refusal = completions["large"].error
    assert isinstance(refusal, RequestError)
    assert refusal.code == "request_too_large"
    assert completions["small"].result is not None
    assert not engine.stats()["stored_bytes"]
    assert score(engine, large).passes > 1


def test_a_real_allocation_failure_in_staging(small_passes: ScoringEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that cannot be allocated: torch's own error, in the thread that prepares passes."""
    shapes = small_passes._runner.model.kv_shapes
    monkeypatch.setattr(small_passes._runner.model, "kv_shapes", lambda: [(n, d * 10**13) for n, d in shapes()])
    completions = run_all(small_passes, {"cut": a_plan(2, 60, 40), "whole": a_plan(1, 10, 2)})
    error = completions["cut"].error
    assert isinstance(error, RequestError)
    assert error.code == "request_too_large"
    assert completions["whole"].result is not None


def test_failure_while_the_next_pass_is_prepared(small_passes: ScoringEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prepared pass holds the failing plan too: it runs without it, and nothing stays stored."""
    engine = small_passes
    plans = {"bad": a_plan(2, 60, 60), "good": a_plan(3, 50, 60)}
    expected = score(engine, plans["good"]).logprobs
    poison(monkeypatch, plans["bad"], ZeroDivisionError())
    completions = run_all(engine, plans)
    assert completions["bad"].error is not None
    result = completions["good"].result
    assert result is not None
    assert np.array_equal(result.logprobs, expected)
    assert not engine.stats()["stored_bytes"]


def test_a_value_that_is_not_finite_stays_in_its_own_result(
    engine: ScoringEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = {"a": a_plan(1), "nan": a_plan(2)}
    expected = score(engine, plans["a"]).logprobs
    odd = int(plans["nan"].tokens[5])
    weight = engine._runner.model.head_weight
    kept = weight[odd].clone()
    clean = not np.isin(odd, plans["a"].tokens)
    assert clean
    # As an embedding the row is infinite for one plan only; as a head row it is put back by the copy below.
    embed = __import__("workers.engine.kernels.embedding.cpu", fromlist=["embedding"])
    plain = embed.embedding

    def infinite(tokens: Any, table: Any, scale: float) -> Any:
        rows = plain(tokens, table, scale)
        rows[tokens == odd] = float("inf")
        return rows

    monkeypatch.setattr(embed, "embedding", infinite)
    completions = run_all(engine, plans)
    nan, fine = completions["nan"].result, completions["a"].result
    assert nan is not None
    assert fine is not None
    assert not np.isfinite(nan.logprobs).any()
    assert np.array_equal(fine.logprobs, expected)
    assert (weight[odd] == kept).all()


def test_the_next_pass_is_prepared_while_one_runs(small_passes: ScoringEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    stage = Runner.stage

    def recording(self: Runner, packed: Any) -> StagedPass:
        threads.append(threading.current_thread().name)
        return stage(self, packed)

    monkeypatch.setattr(Runner, "stage", recording)
    score(small_passes, a_plan(2, 60, 60))
    assert sum(name.startswith("prepare-pass") for name in threads) >= len(threads) - 3


def test_counters(small_passes: ScoringEngine) -> None:
    engine = small_passes
    plan = a_plan(2, 60, 40)
    result = score(engine, plan)
    stats = engine.stats()
    assert stats["passes"] == result.passes == len(stats["pass_samples"])
    assert stats["packed_tokens"] == result.packed_tokens == sum(tokens for tokens, _ in stats["pass_samples"])
    assert all(0 < occupancy <= 1 for _, occupancy in stats["pass_samples"])
    assert stats["busy_s"] * 1e3 == pytest.approx(result.busy_ms)
    assert engine.stats()["pass_samples"] == []


def test_warm_up_runs_passes_and_leaves_no_trace(tiny_checkpoint: Path) -> None:
    engine = ScoringEngine.load(engine_config(tiny_checkpoint, warmup="full", token_budget=400))
    engine.warm_up()
    assert engine.info.warmup_s > 0
    assert not engine.has_work
    assert engine.stats()["packed_tokens"] == 0
    assert engine.stats()["stored_bytes"] == 0


def test_close_twice(tiny_checkpoint: Path) -> None:
    engine = ScoringEngine.load(engine_config(tiny_checkpoint))
    engine.submit("waits", a_plan())
    engine.close()
    engine.close()


def test_progress_is_reported(tiny_checkpoint: Path) -> None:
    lines: list[str] = []
    ScoringEngine.load(engine_config(tiny_checkpoint), on_progress=lines.append)
    assert lines
    assert "100 %" in lines[-1]


def test_fingerprint_is_stable_and_opaque(tiny_checkpoint: Path, engine: ScoringEngine) -> None:
    again = ScoringEngine.load(engine_config(tiny_checkpoint, threads=1, token_budget=64))
    assert again.info.fingerprint == engine.info.fingerprint
    assert engine.info.fingerprint.startswith("fp_")
    assert len(engine.info.fingerprint) == 13
    config = engine_config(tiny_checkpoint)
    other = replace(config, model=replace(config.model, revision="1" * 40))
    assert ScoringEngine.load(other).info.fingerprint != engine.info.fingerprint


def test_threads_are_in_the_fingerprint_where_products_run_in_pieces(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There a library may split sums over them: with another number the bits are others."""
    monkeypatch.setattr(load, "verify_invariance", lambda *_: (RowRule(64, 64), True))
    before = torch.get_num_threads()
    configs = [engine_config(tiny_checkpoint, threads=threads) for threads in (1, 2, 2)]
    one, two, again = (ScoringEngine.load(config).info.fingerprint for config in configs)
    torch.set_num_threads(before)
    assert one != two
    assert two == again


@pytest.mark.parametrize("settings", [{"quant": "w8a16"}, {"quant": "fp8s"}], ids=str)
def test_what_this_engine_cannot_run_is_refused(tiny_checkpoint: Path, settings: dict[str, str]) -> None:
    with pytest.raises(LoadError, match="not supported"):
        ScoringEngine.load(engine_config(tiny_checkpoint, **settings))


def test_the_host_s_work_of_passes_is_done_in_turns(
    small_passes: ScoringEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes that are prepared beside a running one among them; the running itself takes no turn of the host."""
    turns, held = Turns(), threading.local()
    inside: list[tuple[str, bool]] = []

    @contextmanager
    def turn() -> Iterator[None]:
        with turns.first():
            held.now = True
            try:
                yield
            finally:
                held.now = False

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            inside.append((name, getattr(held, "now", False)))
            return call(*args)

        return run

    small_passes.host_turn = turn
    runner = small_passes._runner
    monkeypatch.setattr(runner, "stage", noted("stage", runner.stage))
    monkeypatch.setattr(runner, "run", noted("run", runner.run))
    monkeypatch.setattr(engine_module, "launch", noted("launch", engine_module.launch))
    assert run_all(small_passes, {"a": a_plan(2, 60, 60), "b": a_plan(3, 50, 60)})["a"].result is not None
    assert {("stage", True), ("launch", True), ("run", False)} == set(inside)
    assert inside.count(("launch", True)) > 2
