"""The warm-up's list holds every kind of pass; what it compiles is counted, and what comes later is told of."""

from pathlib import Path

import numpy as np
import pytest

from spinf_serve.plan import F32
from tests.engine.fakes import FakeAllocator, FakePending, FakeRunner, FakeStaged, fake_engine
from tests.engine.support import engine_config, score
from tests.engine.test_pipeline import a_plan
from workers.engine.compiles import CompileCounter
from workers.engine.engine import ScoringEngine
from workers.engine.errors import LoadError
from workers.engine.memory import Memory
from workers.engine.models import model_config
from workers.engine.validate import check_plan
from workers.engine.warmup import warm_up, warmup_passes, warmup_plan

WINDOW = 16


def passes_of(runner: FakeRunner) -> list[FakeStaged]:
    return runner.staged


@pytest.mark.parametrize(("budget", "most"), [(16_384, 65_536), (2048, 4096), (100, 300), (64, 64), (16, 20)])
def test_every_kind_of_pass_runs(budget: int, most: int) -> None:
    runner = FakeRunner()
    engine = fake_engine(runner, FakeAllocator(), token_budget=budget, max_tokens=most, warmup="full")
    engine.warm_up()
    packed = [staged.packed for staged in passes_of(runner)]
    sizes = [len(one.tokens) for one in packed]
    assert min(sizes) == 1
    assert max(sizes) == max(budget, most)
    assert any(0.85 * budget <= size <= budget for size in sizes), "a full pass"
    assert any(one.captures for one in packed)
    assert any(one.stores for one in packed)
    assert any(one.positions.max() > min(WINDOW, most - 2) for one in packed)
    assert any(len(one.read_rows) >= min(budget // 3, 2000) for one in packed), "many rows are read"
    assert sizes[-1] == max(size for size in sizes if size <= budget), "the last one is like a busy server's"
    assert not engine.stats()["stored_bytes"]
    assert not engine.has_work


def test_levels() -> None:
    def ran(level: str) -> list[int]:
        runner = FakeRunner()
        engine = fake_engine(runner, FakeAllocator(), token_budget=2000, max_tokens=4000, warmup=level)
        engine.warm_up()
        assert engine.info.warmup_s > 0
        return [len(staged.packed.tokens) for staged in runner.staged]

    assert ran("none") == []
    short = ran("short")
    assert len(short) == 2
    assert short[0] <= 256
    assert short[1] > 1700
    assert len(ran("full")) > 6


def test_on_the_cpu_one_short_pass_is_enough() -> None:
    for level, count in (("full", 1), ("short", 1), ("none", 0)):
        runner = FakeRunner()
        fake_engine(runner, warmup=level).warm_up()
        assert len(runner.staged) == count


SMALL = (1, 2, 3, 5, 11, 12, 13, 14, 16, 25, 64, 1000)


@pytest.mark.parametrize("level", ["full", "short"])
@pytest.mark.parametrize("most", [*SMALL[1:], 2048])
def test_every_allowed_budget_starts(level: str, most: int) -> None:
    """With plans that a request could have, in passes of the budget at most, unless a piece is larger."""
    for budget in SMALL:
        config = engine_config(Path("nowhere"), token_budget=budget, max_tokens=most, warmup=level)
        for one in warmup_passes(config, WINDOW):
            check_plan(one.plan, 10, most)
            assert 1 <= one.budget <= budget
        runner = FakeRunner()
        fake_engine(runner, FakeAllocator(), token_budget=budget, max_tokens=most, warmup=level).warm_up()
        sizes = [len(staged.packed.tokens) for staged in runner.staged]
        assert max(sizes) > 0.5 * budget, "a full pass"


def test_plan() -> None:
    plan = warmup_plan([3, 1], 2, 2)
    assert plan.parents.tolist() == [-1, 0, 1, 2, 3, 2, 5, -1, 7, 8, 7, 10]
    assert plan.read_rows.tolist() == [4, 6, 9, 11]
    assert warmup_plan([4], 0).read_rows.tolist() == [3]


def test_a_real_model_takes_the_whole_list(tiny_checkpoint: Path) -> None:
    """With an allocator it is warmed up as on a GPU, and scores as before."""
    engine = ScoringEngine.load(engine_config(tiny_checkpoint, token_budget=300, max_tokens=500, warmup="full"))
    before = score(engine, a_plan()).logprobs
    engine._memory = Memory(FakeAllocator())
    lines: list[str] = []
    assert engine._window == model_config(tiny_checkpoint).sliding_window
    engine.warm_up(lines.append)
    assert len(lines) == len(warmup_passes(engine.config, WINDOW))
    assert lines[0] == "warm-up 1 of 7: one token"
    assert np.array_equal(score(engine, a_plan()).logprobs, before)
    engine.close()


def fails_over(tokens: int) -> FakeRunner:
    def fault(staged: FakeStaged) -> Exception | None:
        return RuntimeError("CUDA out of memory.") if len(staged.packed.tokens) > tokens else None

    return FakeRunner(launch_fault=fault)


def test_a_longest_input_that_does_not_fit_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    allocator, runner = FakeAllocator(), fails_over(2000)
    fake_engine(runner, allocator, token_budget=2000, max_tokens=4000, warmup="full").warm_up()
    assert "4000 tokens does not fit the memory: a request of that size will be refused" in caplog.text
    assert not runner.stored
    assert allocator.releases


def test_a_budget_that_does_not_fit_ends_the_start() -> None:
    engine = fake_engine(fails_over(1000), FakeAllocator(), token_budget=2000, max_tokens=2000, warmup="full")
    with pytest.raises(LoadError, match=r"2000 tokens does not fit the GPU's memory: lower --token-budget"):
        engine.warm_up()


@pytest.mark.parametrize("level", ["full", "short"])
def test_scores_that_are_not_finite_end_the_start(tiny_checkpoint: Path, level: str) -> None:
    """Every weight is a number; together they leave the range of float32. Without a warm-up requests are refused."""
    engine = ScoringEngine.load(engine_config(tiny_checkpoint, warmup=level))
    engine._runner.model.model.layers[1].post_attention_layernorm.scale.fill_(3e38)
    with pytest.raises(LoadError, match=r"a short pass .* not finite: the weights in .*snapshot are damaged"):
        engine.warm_up()
    assert not engine.stats()["stored_bytes"]
    engine.close()


@pytest.mark.parametrize("number", range(7))
def test_every_pass_of_a_gpu_is_looked_at(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def wait(pending: FakePending) -> F32:
        values = pending.staged.packed.entry_cols.astype(np.float32)
        values[-1] = np.nan if pending.staged.number == number else 0
        return values

    monkeypatch.setattr(FakePending, "wait", wait)
    engine = fake_engine(FakeRunner(), FakeAllocator(), token_budget=2000, max_tokens=4000, warmup="full")
    with pytest.raises(LoadError, match=r"of the warm-up gives scores that are not finite"):
        engine.warm_up()


def test_memory_is_measured_over_the_warm_up() -> None:
    allocator = FakeAllocator(held=10)

    def grow(staged: FakeStaged) -> None:
        allocator.most = max(allocator.most, 10 + len(staged.packed.tokens))

    engine = fake_engine(FakeRunner(wait_fault=grow), allocator, token_budget=2000, max_tokens=2000, warmup="full")
    allocator.most = 10**9  # while it was loaded
    allocator.held = 12  # workspaces
    engine.warm_up()
    memory = engine._memory
    assert memory is not None
    assert (memory.weights, memory.idle) == (10, 12)
    assert engine.stats()["peak_bytes"] == 2010


def test_compilations_are_counted_and_late_ones_told_of(caplog: pytest.LogCaptureFixture) -> None:
    counter = CompileCounter()

    def compiling(staged: FakeStaged) -> None:
        counter._heard(src=None, cache_hit=staged.number % 2 == 1)

    engine = fake_engine(FakeRunner(wait_fault=compiling), FakeAllocator(), token_budget=2000, warmup="short")
    engine._compiles = counter
    engine.warm_up()
    assert (engine.info.compiles, counter.loaded, engine.stats()["late_compiles"]) == (1, 1, 0)
    assert "while serving" not in caplog.text
    score(engine, a_plan())
    assert engine.stats()["late_compiles"] == 1
    assert "a kernel was compiled while serving" in caplog.text


def test_without_a_warm_up_the_first_calls_are_meant_to_pay() -> None:
    engine = fake_engine(FakeRunner(), FakeAllocator(), warmup="none")
    engine._compiles = counter = CompileCounter()
    engine.warm_up()
    counter._heard(src=None, cache_hit=False)
    assert engine.stats()["late_compiles"] == 0


def test_the_counter_hears_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    knobs = pytest.importorskip("triton").knobs
    monkeypatch.setattr(knobs.compilation, "listener", None)
    counter = CompileCounter()
    counter.listen()
    assert knobs.compilation.listener is not None
    knobs.compilation.listener(src=None, metadata={}, metadata_group={}, times=None, cache_hit=False)
    assert counter.compiled == 1


def test_warm_up_without_compiles_and_reports() -> None:
    config = engine_config(Path("nowhere"), token_budget=200, max_tokens=200, warmup="full")
    runner = FakeRunner()
    warm_up(config, runner, WINDOW, Memory(FakeAllocator()), None, None)
    assert runner.staged
