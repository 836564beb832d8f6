"""The thread that owns an engine in one's own process, with a stand-in engine."""

import signal
import threading
import time
from typing import Any

import numpy as np
import pytest

from spinf_serve.engine_thread import EngineThread
from spinf_serve.plan import Completion, ScorePlan, ScoreResult
from spinf_serve.protocol.errors import RequestError
from tests.support.interrupts import interrupted_everywhere


def plan(number: int) -> ScorePlan:
    one = np.array([number], np.int32)
    offsets = np.array([0, 1], np.int64)
    return ScorePlan(one, one, offsets, one, one, offsets, one)


class FakeEngine:
    """Answers each plan with its token; a pass takes everything that is there. Odd behaviour by token."""

    def __init__(self) -> None:
        self.waiting: dict[Any, ScorePlan] = {}
        self.passes: list[int] = []
        self.cancelled: list[Any] = []
        self.gate = threading.Event()
        self.gate.set()
        self.threads: set[int] = set()

    @property
    def has_work(self) -> bool:
        return bool(self.waiting)

    def submit(self, key: Any, plan: ScorePlan) -> None:
        self.threads.add(threading.get_ident())
        if plan.tokens[0] == 400:
            raise RequestError("content_too_long", "too long")
        if plan.tokens[0] == 500:
            raise ValueError("broken plan")
        self.waiting[key] = plan

    def cancel(self, key: Any) -> None:
        self.threads.add(threading.get_ident())
        self.cancelled.append(key)
        self.waiting.pop(key, None)

    def step(self, arrivals: Any = None) -> list[Completion]:
        self.threads.add(threading.get_ident())
        done, self.waiting = self.waiting, {}
        if not done:
            return []
        self.gate.wait(10)
        self.passes.append(len(done))
        if any(plan.tokens[0] == 666 for plan in done.values()):
            raise MemoryError
        return [self.completion(key, plan) for key, plan in done.items()]

    def completion(self, key: Any, plan: ScorePlan) -> Completion:
        if plan.tokens[0] == 413:
            return Completion(key, error=RequestError("request_too_large", "memory"))
        return Completion(key, ScoreResult(plan.tokens.astype(np.float32), "fp_x"))


def outcome(thread: EngineThread, number: int, into: dict[int, Any]) -> threading.Thread:
    def call() -> None:
        try:
            into[number] = float(thread.run(plan(number)).logprobs[0])
        except RequestError as error:
            into[number] = error.code

    worker = threading.Thread(target=call)
    worker.start()
    return worker


def until(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_many_threads_get_their_own_results_and_share_passes() -> None:
    engine = FakeEngine()
    thread = EngineThread(engine)
    found: dict[int, Any] = {}
    engine.gate.clear()
    first = outcome(thread, 1, found)
    until(lambda: not engine.has_work and thread._inbox.empty() and thread._answers)
    others = [outcome(thread, number, found) for number in range(2, 40)]
    until(lambda: len(thread._answers) == 39)
    engine.gate.set()
    for worker in [first, *others]:
        worker.join(10)
    thread.close()
    assert found == {number: float(number) for number in range(1, 40)}
    assert sum(engine.passes) == 39
    assert len(engine.passes) <= 3
    assert len(engine.threads) == 1


def test_one_bad_request_fails_alone() -> None:
    thread = EngineThread(FakeEngine())
    found: dict[int, Any] = {}
    for worker in [outcome(thread, number, found) for number in (1, 400, 2, 500, 413, 3)]:
        worker.join(10)
    assert found == {1: 1, 2: 2, 3: 3, 400: "content_too_long", 500: "engine_error", 413: "request_too_large"}
    assert float(thread.run(plan(7)).logprobs[0]) == 7
    thread.close()


def test_a_failed_engine_answers_everyone_and_takes_no_more() -> None:
    engine = FakeEngine()
    thread = EngineThread(engine)
    engine.gate.clear()
    found: dict[int, Any] = {}
    workers = [outcome(thread, 666, found)]
    until(lambda: thread._answers and thread._inbox.empty() and not engine.has_work)
    workers += [outcome(thread, number, found) for number in (1, 2)]
    until(lambda: len(thread._answers) == 3)
    engine.gate.set()
    for worker in workers:
        worker.join(10)
    assert found == {666: "model_unavailable", 1: "model_unavailable", 2: "model_unavailable"}
    with pytest.raises(RequestError, match="model_unavailable"):
        thread.run(plan(3))
    thread.close()


def test_close_fails_what_waits_and_may_be_called_twice() -> None:
    engine = FakeEngine()
    thread = EngineThread(engine)
    engine.gate.clear()
    found: dict[int, Any] = {}
    first = outcome(thread, 1, found)
    until(lambda: thread._answers and thread._inbox.empty() and not engine.has_work)
    closer = threading.Thread(target=thread.close)
    closer.start()
    until(lambda: thread._refusal)
    with pytest.raises(RequestError, match="the engine was closed"):
        thread.run(plan(2))
    engine.gate.set()
    for worker in (closer, first):
        worker.join(10)
        assert not worker.is_alive()
    assert found == {1: 1.0}, "a pass that runs is finished"
    thread.close()


def test_an_interrupted_caller_cancels_its_plan() -> None:
    engine = FakeEngine()
    thread = EngineThread(engine)
    engine.gate.clear()
    first = outcome(thread, 1, {})
    until(lambda: thread._answers and thread._inbox.empty() and not engine.has_work)
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(KeyboardInterrupt):
            thread.run(plan(2))
    finally:
        signal.signal(signal.SIGALRM, previous)
    engine.gate.set()
    first.join(10)
    assert float(thread.run(plan(3)).logprobs[0]) == 3
    assert engine.cancelled == [1]
    assert not thread._answers
    thread.close()


def test_the_thread_lives_on_wherever_a_caller_is_interrupted() -> None:
    thread = EngineThread(FakeEngine())
    found: dict[int, Any] = {}
    interrupts = 0
    for _interrupt in interrupted_everywhere(lambda: thread.run(plan(1))):
        interrupts += 1
        other = outcome(thread, interrupts, found)
        other.join(10)
        assert found == {number: float(number) for number in range(1, interrupts + 1)}
    assert interrupts > 5
    thread.close()
