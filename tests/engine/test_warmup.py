"""The warm-up's list holds every kind of pass; what it compiles is counted, and what comes later is told of."""

import errno
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

from spinf_serve.plan import F32
from tests.engine.fakes import FakeAllocator, FakePending, FakeRunner, FakeStaged, fake_engine
from tests.engine.support import engine_config, score
from tests.engine.test_pipeline import a_plan
from workers.engine import device
from workers.engine.compiles import CompileCounter
from workers.engine.engine import ScoringEngine
from workers.engine.errors import LoadError, NotNow
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
    assert {bool(one.segments.by_position.any()) for one in packed} == {False, True}, "both attention kernels"
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
    assert lines[0] == "warm-up 1 of 8: one token"
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


GONE = 5 << 30
"""Bytes that another process holds."""


def test_a_budget_that_does_not_fit_beside_another_process_may_fit_later(caplog: pytest.LogCaptureFixture) -> None:
    """Also a single token: the other took all that was left. Nothing is said about the budget."""
    for tokens in (0, 1000):
        allocator, runner = FakeAllocator(foreign=GONE), fails_over(tokens)
        engine = fake_engine(runner, allocator, token_budget=2000, max_tokens=2000, warmup="full")
        with pytest.raises(NotNow, match=r"does not fit the GPU's memory now: other processes hold 5\.0 GiB$"):
            engine.warm_up()
        assert not runner.stored
    assert "--token-budget" not in caplog.text


def test_what_a_context_may_take_is_no_other_process() -> None:
    engine = fake_engine(fails_over(0), FakeAllocator(foreign=900 << 20), warmup="short")
    with pytest.raises(LoadError, match="lower --token-budget"):
        engine.warm_up()


@pytest.mark.parametrize("stays", [False, True])
def test_a_process_that_comes_and_goes_is_not_the_budgets_fault(stays: bool) -> None:
    """Two engines that start on one card take each other's memory, and one may be gone when the other looks."""
    allocator, failed = FakeAllocator(), 0

    def fault(staged: FakeStaged) -> Exception | None:
        nonlocal failed
        if len(staged.packed.tokens) < 1000 or (failed and not stays):
            return None
        failed += 1
        allocator.foreign = GONE if failed > 1 else 0
        return RuntimeError("CUDA out of memory.")

    engine = fake_engine(FakeRunner(launch_fault=fault), allocator, token_budget=2000, max_tokens=2000, warmup="short")
    if stays:
        with pytest.raises(NotNow, match="other processes hold"):
            engine.warm_up()
    else:
        engine.warm_up()
    assert allocator.releases


# Kernels that find no room


def test_a_disk_that_fills_while_kernels_are_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence, and the directory at fault: the cache, or where the compiler works."""
    pytest.importorskip("triton")
    places = {"TRITON_CACHE_DIR": tmp_path / "cache", "TMPDIR": tmp_path / "work"}
    for name, path in places.items():
        path.mkdir()
        monkeypatch.setenv(name, str(path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    for name, path in places.items():
        for reason in (errno.ENOSPC, errno.EDQUOT):
            full = OSError(reason, os.strerror(reason))
            runner = FakeRunner(launch_fault=lambda staged, full=full: full)
            engine = fake_engine(runner, FakeAllocator(), warmup="short")
            monkeypatch.setattr(device, "_write_error", lambda at, path=path, full=full: full if at == path else None)
            with pytest.raises(LoadError) as refused:
                engine.warm_up()
            said = f"compiled kernels cannot be kept in {path} ({full.strerror}): set {name}"
            assert str(refused.value) == said


def test_other_errors_of_a_disk_are_no_matter_of_room() -> None:
    runner = FakeRunner(launch_fault=lambda staged: OSError(errno.EIO, "error"))
    engine = fake_engine(runner, FakeAllocator(), warmup="short")
    with pytest.raises(OSError, match="error"):
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


@pytest.mark.parametrize("number", range(8))
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
