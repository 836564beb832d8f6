"""When a pass ran: what the host sees of it, and what the device's own clock says. Time is made up here."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from spinf_serve.plan import ScoreResult
from tests.engine.fakes import FakeRunner, FakeStaged, fake_engine
from tests.engine.support import drain
from tests.engine.test_pipeline import a_plan
from workers.engine import engine as engine_module
from workers.engine import pipeline
from workers.engine.clock import Clock, CudaClock

LAUNCH_S = 0.020
"""A small pass is over when the host has launched its last kernel."""


@dataclass
class FakeTime:
    """The time module, and a runner whose launches take time while its device is never late."""

    now: float = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def launches(self, _staged: FakeStaged) -> None:
        self.now += LAUNCH_S


@dataclass
class FakeClock:
    """Every pass takes the device `took` seconds. `marks`: how many were made."""

    took: float
    marks: int = 0

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def seconds(self, begin: int, end: int) -> float:
        assert end == begin + 1, "the marks of one pass"
        return self.took


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    made = FakeTime()
    monkeypatch.setattr(pipeline, "time", made)
    monkeypatch.setattr(engine_module, "time", made)
    return made


def two_passes(time: FakeTime, clock: Clock | None) -> tuple[dict[Any, ScoreResult], float]:
    """The results of two calls that come together and never share a pass, and the engine's seconds in passes."""
    engine = fake_engine(FakeRunner(launch_fault=time.launches), invariant=False, clock=clock)
    for key in "ab":
        engine.submit(key, a_plan(1, 20, 2))
    for ticket in engine._tickets.values():
        ticket.received = time.now
    results = {c.key: c.result for c in drain(engine)}
    assert all(result is not None and result.passes == 1 for result in results.values())
    return results, engine.stats()["busy_s"]  # type: ignore[return-value]


def test_a_launch_is_part_of_its_pass(time: FakeTime) -> None:
    """The device works while the host still launches: that is no waiting in a queue."""
    engine = fake_engine(FakeRunner(launch_fault=time.launches))
    engine.submit("a", a_plan(1, 20, 2))
    (ticket,) = engine._tickets.values()
    ticket.received = time.now - 0.005
    (completion,) = drain(engine)
    assert completion.result is not None
    assert completion.result.queue_ms == pytest.approx(5)
    assert completion.result.score_ms == completion.result.busy_ms == pytest.approx(20)
    assert engine.stats()["busy_s"] == pytest.approx(0.020)


def test_without_a_clock_of_the_device_no_time_is_lost_or_counted_twice(time: FakeTime) -> None:
    results, busy_s = two_passes(time, None)
    assert busy_s == pytest.approx(0.040)
    assert sum(result.busy_ms for result in results.values()) == pytest.approx(40)


def test_each_pass_has_the_time_that_the_device_had_it(time: FakeTime) -> None:
    """The host sees the first one's end only after it has launched the second, when that one is about to end too."""
    clock = FakeClock(0.020)
    results, busy_s = two_passes(time, clock)
    assert results["a"].busy_ms == results["b"].busy_ms == pytest.approx(20)
    assert results["a"].queue_ms == pytest.approx(0)
    assert results["b"].queue_ms == pytest.approx(20)
    assert busy_s == pytest.approx(0.040)
    assert clock.marks == 4


def test_no_pass_ends_after_it_was_read(time: FakeTime) -> None:
    """Two clocks drift apart: what the device says never reaches into a time that has not come."""
    results, busy_s = two_passes(time, FakeClock(0.021))
    assert results["a"].busy_ms == pytest.approx(21)
    assert results["b"].busy_ms == pytest.approx(19)
    assert busy_s == pytest.approx(0.040)


@dataclass
class FakeEvent:
    """An event of CUDA: `log` is every event's."""

    log: list[tuple[str, Any]] = field(default_factory=list)

    def __call__(self, **options: bool) -> "FakeEvent":
        self.log.append(("made", options))
        return self

    def record(self) -> None:
        self.log.append(("record", None))

    def synchronize(self) -> None:
        self.log.append(("synchronize", None))

    def elapsed_time(self, _end: "FakeEvent") -> float:
        self.log.append(("elapsed", None))
        return 12.5


def test_marks_of_a_gpu_are_events_that_are_waited_for_only_to_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    events = FakeEvent()
    monkeypatch.setattr(torch.cuda, "Event", events)
    clock = CudaClock()
    begin, end = clock.mark(), clock.mark()
    assert events.log == [("made", {"enable_timing": True}), ("record", None)] * 2
    assert clock.seconds(begin, end) == 0.0125
    assert [what for what, _ in events.log[4:]] == ["synchronize", "elapsed"]
