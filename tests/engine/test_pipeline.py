"""How the engine drives a device that works beside the host. A fake device notes the order of the calls."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spinf_serve.engine_thread import EngineThread
from spinf_serve.plan import Completion, ScorePlan
from spinf_serve.protocol.errors import RequestError
from tests.engine.fakes import FakeAllocator, FakeRunner, FakeStaged, fake_engine
from tests.engine.support import drain, engine_config, make_plan, random_jobs, run_all, score
from workers.engine.engine import ScoringEngine
from workers.engine.pipeline import Pace
from workers.engine.runner import Runner, StagedPass


def a_plan(seed: int = 1, content: int = 40, questions: int = 4) -> ScorePlan:
    return make_plan(random_jobs(seed, 800, [content], questions))[0]


LARGE = a_plan(2, 60, 40)
"""Several passes of 100 tokens, all on one stored content."""


def code_of(completion: Completion) -> str | None:
    return completion.error.code if isinstance(completion.error, RequestError) else None


def holding(plan: ScorePlan, error: Exception) -> Callable[[FakeStaged], Exception | None]:
    """A fault of every pass that holds anything of a plan."""
    return lambda staged: error if any(share.plan is plan for share in staged.packed.shares) else None


def test_the_next_pass_is_queued_before_the_running_one_is_read() -> None:
    runner = FakeRunner()
    result = score(fake_engine(runner), LARGE)
    passes = result.passes
    assert passes > 3
    expected = [("launch", 0)]
    for number in range(passes):
        expected += [("launch", number + 1)] if number + 1 < passes else []
        expected += [("wait", number)]
    assert runner.order("launch", "wait") == expected
    assert np.array_equal(result.logprobs, LARGE.cols.astype(np.float32))


def test_at_most_one_pass_waits_behind_the_running_one() -> None:
    runner = FakeRunner()
    engine = fake_engine(runner)
    engine.submit("a", LARGE)
    while engine.has_work:
        engine.step()
        unread = len(runner.order("launch")) - len(runner.order("wait"))
        assert unread <= 1


def test_busy_time_is_not_counted_twice() -> None:
    result = score(fake_engine(FakeRunner()), LARGE)
    assert 0 < result.busy_ms <= result.score_ms * 1.001


def test_what_arrives_while_a_pass_runs_is_in_the_next_one() -> None:
    """And the tail of a request waits for company until the running pass is about to end."""
    runner = FakeRunner(polls=20)
    engine = fake_engine(runner)
    engine._pace.ran(44, 60.0)  # such passes take a minute: only the end of the pass makes the next one due
    waiting = {"b": a_plan(5, 10, 2), "c": a_plan(6, 10, 2)}
    engine.submit("a", a_plan(4, 20, 2))

    def arrivals() -> None:
        if waiting:
            engine.submit(*waiting.popitem())

    done = engine.step(arrivals)
    assert [c.key for c in done] == ["a"]
    assert runner.order("launch", "wait") == [("launch", 0), ("launch", 1), ("wait", 0)]
    assert len(runner.staged[1].keys) == 2
    assert {c.key for c in drain(engine)} == {"b", "c"}


def test_without_a_way_to_arrive_nothing_waits_for_company() -> None:
    runner = FakeRunner(polls=10**9)
    engine = fake_engine(runner)
    engine._pace.ran(44, 0.05)
    run_all(engine, {"a": LARGE, "b": a_plan(5, 10, 2)})
    launched, waited = 0, 0
    for kind, _ in runner.order("launch", "wait"):
        launched, waited = launched + (kind == "launch"), waited + (kind == "wait")
        assert launched > waited or waited == launched == len(runner.staged)


def test_a_full_pass_is_staged_at_once_and_launched_when_it_is_due() -> None:
    """A device's queue has an end: who launches much too early waits for it, with Python's lock in his hand."""
    runner = FakeRunner(polls=30)
    engine = fake_engine(runner)
    for size in (60, 100):
        engine._pace.ran(size, 60.0)
    engine.submit("a", LARGE)
    staged: list[int] = []
    launched: list[int] = []

    def look() -> None:
        staged.append(len(runner.order("stage")))
        launched.append(len(runner.order("launch")))

    engine.step(look)
    assert staged[-1] == 2
    assert set(launched) == {1}
    assert runner.order("launch", "wait") == [("launch", 0), ("launch", 1), ("wait", 0)]


def test_pace() -> None:
    pace = Pace()
    assert pace.left(1000, 0.0) == 0.0
    pace.ran(1000, 0.1)
    assert pace.left(1000, 0.04) == pytest.approx(0.06)
    assert pace.left(1000, 5.0) == 0.0
    assert pace.left(100, 0.0) == 0.0, "small passes cost more for each token"
    pace.launched(0.010)
    assert pace.launch_lead == pace.lead == pytest.approx(0.017)
    pace.launched(0.200)
    assert pace.launch_lead == pytest.approx(0.0185), "it stood in the queue"
    pace.staged(0.020)
    pace.staged(0.001)
    assert pace.lead - pace.launch_lead == pytest.approx(0.027)
    pace.waited(0.030)
    pace.waited(0.0)
    assert pace.launch_lead == pytest.approx(0.0185 + 0.027)


# Leaving


def test_stores_of_a_cancelled_request_stay_until_no_pass_in_flight_holds_it() -> None:
    runner = FakeRunner()
    engine = fake_engine(runner)
    engine.submit("a", LARGE)
    engine.step()
    assert runner.order("launch")[-1] == ("launch", 1)  # in flight, and reads the content that pass 0 stored
    engine.cancel("a")
    assert engine.stats()["stored_bytes"]
    assert not runner.order("free")
    assert engine.step() == []
    assert runner.events[-2:] == [("wait", 1), ("free", 0)]
    assert not engine.stats()["stored_bytes"]
    assert not engine.has_work


def test_a_key_may_come_back_while_its_old_plan_is_in_flight() -> None:
    runner = FakeRunner()
    engine = fake_engine(runner)
    engine.submit("a", LARGE)
    engine.step()
    engine.cancel("a")
    other = a_plan(9, 50, 30)
    engine.submit("a", other)
    (completion,) = drain(engine)
    assert completion.result is not None
    assert np.array_equal(completion.result.logprobs, other.cols.astype(np.float32))
    assert not engine.stats()["stored_bytes"]


def test_cancelled_while_it_runs() -> None:
    engine = fake_engine(FakeRunner())
    engine.submit("a", a_plan(1, 20, 2))
    engine.submit("b", a_plan(2, 20, 2))
    assert [c.key for c in engine.step(lambda: engine.cancel("a"))] == ["b"]
    assert not engine.has_work


def test_close_waits_for_what_is_in_flight() -> None:
    runner = FakeRunner()
    engine = fake_engine(runner)
    engine.submit("a", LARGE)
    engine.step()
    engine.close()
    engine.close()
    assert runner.order("wait", "close")[:3] == [("wait", 0), ("wait", 1), ("close", None)]


# Failures


@pytest.mark.parametrize("where", ["launch_fault", "wait_fault"])
def test_only_the_request_at_fault_fails(where: str) -> None:
    plans = {"a": a_plan(1, 20, 2), "bad": a_plan(2, 60, 60), "b": a_plan(3, 50, 60)}
    runner = FakeRunner()
    setattr(runner, where, holding(plans["bad"], ZeroDivisionError("in a kernel")))
    engine = fake_engine(runner, FakeAllocator())
    completions = run_all(engine, plans)
    assert {key: code_of(c) for key, c in completions.items()} == {"a": None, "bad": "engine_error", "b": None}
    for key in "ab":
        result = completions[key].result
        assert result is not None
        assert np.array_equal(result.logprobs, plans[key].cols.astype(np.float32))
    assert not engine.stats()["stored_bytes"]
    assert engine.degraded is None


def test_what_ran_behind_a_failed_pass_runs_again() -> None:
    """It may have read what the failed pass was to store."""
    runner = FakeRunner(wait_fault=lambda staged: ZeroDivisionError() if staged.number == 0 else None)
    engine = fake_engine(runner)
    completions = run_all(engine, {"a": a_plan(1, 20, 12), "b": a_plan(3, 20, 12)})
    assert all(c.error is None for c in completions.values())
    assert len(runner.staged[0].keys) == 2
    spans = [[(s.key, s.piece.first, s.piece.last) for s in staged.packed.shares] for staged in runner.staged]
    behind = [number for number, span in enumerate(spans) if span == spans[1]]
    assert len(behind) == 2
    waits = runner.order("wait")
    assert waits[:2] == [("wait", 0), ("wait", 1)]
    alone = waits.index(("wait", behind[1])) - 2
    assert alone == 2, "the requests of the failed pass run first, each alone"


def test_a_pass_that_fails_behind_another_gets_the_device_to_itself() -> None:
    runner = FakeRunner()
    out_of_memory = MemoryError()

    def beside(staged: FakeStaged) -> Exception | None:
        unread = len(runner.order("launch")) - len(runner.order("wait"))
        return out_of_memory if unread else None

    runner.launch_fault = beside
    result = score(fake_engine(runner, FakeAllocator()), LARGE)
    assert np.array_equal(result.logprobs, LARGE.cols.astype(np.float32))
    kinds = [kind for kind, _ in runner.order("launch", "wait")]
    assert kinds == ["launch", "wait"] * result.passes


@pytest.mark.parametrize("error", [ZeroDivisionError("in a kernel"), MemoryError()], ids=["fault", "memory"])
def test_nobody_pays_for_a_request_at_fault_that_left_while_its_pass_ran(error: Exception) -> None:
    plans = {"bad": a_plan(2, 20, 2), "good": a_plan(1, 20, 2)}
    engine = fake_engine(FakeRunner(wait_fault=holding(plans["bad"], error)), FakeAllocator())
    for key, plan in plans.items():
        engine.submit(key, plan)
    (completion,) = [*engine.step(lambda: engine.cancel("bad")), *drain(engine)]
    assert completion.key == "good"
    assert completion.result is not None
    assert np.array_equal(completion.result.logprobs, plans["good"].cols.astype(np.float32))
    assert not engine.stats()["stored_bytes"]


def test_a_device_that_is_gone_ends_the_engine() -> None:
    runner = FakeRunner(wait_fault=lambda staged: RuntimeError("CUDA error: an illegal memory access"))
    allocator = FakeAllocator()
    engine = fake_engine(runner, allocator)
    allocator.alive = False
    engine.submit("a", a_plan())
    with pytest.raises(RuntimeError, match="illegal"):
        engine.step()


# Memory


def out_of_memory_for(plan: ScorePlan, allocator: FakeAllocator, kept: int) -> Callable[[FakeStaged], Exception | None]:
    """Passes with the plan do not fit; `kept` bytes stay behind each time."""

    def fault(staged: FakeStaged) -> Exception | None:
        if not any(share.plan is plan for share in staged.packed.shares):
            return None
        allocator.held += kept
        return RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")

    return fault


@pytest.mark.parametrize("where", ["stage_fault", "launch_fault", "wait_fault"])
def test_out_of_memory_is_the_fault_of_one_request(where: str) -> None:
    allocator, runner, large = FakeAllocator(held=10 << 30), FakeRunner(), a_plan(2, 60, 60)
    fault = out_of_memory_for(large, allocator, 0)
    setattr(runner, where, (lambda packed: fault(FakeStaged(0, packed))) if where == "stage_fault" else fault)
    engine = fake_engine(runner, allocator)
    completions = run_all(engine, {"large": large, "small": a_plan(1, 20, 2)})
    assert {key: code_of(c) for key, c in completions.items()} == {"large": "request_too_large", "small": None}
    assert allocator.releases >= 2, "before others run, and before it is measured"
    assert not engine.stats()["stored_bytes"]
    assert engine.degraded is None
    assert score(engine, a_plan(1, 20, 2)).passes == 1


def test_memory_that_does_not_come_back_marks_the_engine_degraded() -> None:
    allocator, runner, large = FakeAllocator(held=10 << 30), FakeRunner(), a_plan(2, 60, 4)
    runner.launch_fault = out_of_memory_for(large, allocator, 600 << 20)
    engine = fake_engine(runner, allocator)
    assert code_of(run_all(engine, {"large": large})["large"]) == "request_too_large"
    assert engine.degraded is None  # 600 MiB
    run_all(engine, {"large": large})
    assert engine.degraded is not None  # 1200 MiB
    assert "1,200 MiB" in engine.degraded


def test_what_other_requests_store_is_no_leak() -> None:
    allocator, runner, large = FakeAllocator(), FakeRunner(), a_plan(3, 60, 4)
    engine = fake_engine(runner, allocator)
    engine.submit("stays", LARGE)
    engine.step()
    (store,) = runner.stored
    runner.stored[store] = allocator.held = 3 << 30
    runner.launch_fault = out_of_memory_for(large, allocator, 0)
    engine.submit("large", large)
    while not allocator.releases or engine._check_memory:
        assert not engine.step()
    assert engine.degraded is None
    allocator.held = 0
    assert {c.key: code_of(c) for c in drain(engine)} == {"stays": None, "large": "request_too_large"}
    assert engine.degraded is None


def test_memory_figures() -> None:
    allocator = FakeAllocator(held=5, cached=2)
    engine = fake_engine(FakeRunner(), allocator)
    allocator.held, allocator.most = 6, 9
    found = engine.stats()
    assert (found["memory_bytes"], found["weights_bytes"], found["peak_bytes"]) == (8, 5, 9)


def test_every_thread_that_drives_the_engine_takes_its_device() -> None:
    allocator = FakeAllocator()
    engine = fake_engine(FakeRunner(), allocator, warmup="short")
    engine.warm_up()
    assert allocator.threads == {threading.get_ident()}
    thread = EngineThread(engine)
    assert thread.run(LARGE).passes > 3
    thread.close()
    assert len(allocator.threads) == 3, "the caller's, the engine's, and the one that stages"


# Schemes that are not batch-invariant


def test_no_pass_holds_two_requests_where_company_changes_scores() -> None:
    runner = FakeRunner()
    engine = fake_engine(runner, invariant=False)
    plans = {str(i): a_plan(i, 30, 2 + 10 * (i % 2)) for i in range(5)}
    completions = run_all(engine, plans)
    assert all(len(staged.keys) == 1 for staged in runner.staged)
    results = [c.result for c in completions.values()]
    assert all(result is not None and not result.shared_pass for result in results)


# The CPU's way


def test_a_prepared_pass_is_staged_again_after_a_failure(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was staged on the stores of the pass that failed."""
    engine = ScoringEngine.load(engine_config(tiny_checkpoint, token_budget=100, max_tokens=300))
    expected = score(engine, LARGE).logprobs
    run, runs = Runner.run, []

    def failing_once(self: Runner, staged: StagedPass) -> Any:
        runs.append(staged)
        if len(runs) == 1:
            raise ZeroDivisionError
        return run(self, staged)

    monkeypatch.setattr(Runner, "run", failing_once)
    small = a_plan(7, 10, 1)
    completions = run_all(engine, {"small": small, "large": LARGE})
    result = completions["large"].result
    assert result is not None
    assert np.array_equal(result.logprobs, expected)
    engine.close()
