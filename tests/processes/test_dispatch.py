"""Admission and dispatch as plain objects: every accepted request gets exactly one outcome, whatever dies when."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spinf_serve.protocol.errors import RequestError
from spinf_serve.wire.frontend import Answer, Credit
from spinf_serve.wire.preprocess import CancelWork, Work
from workers.frontend.admission import Admission
from workers.frontend.dispatch import Dispatcher


def work(request_id: str) -> Work:
    return Work(request_id, 1, "score", False, None, 0.0, b"{}")


def answer(worker: str, request_id: str, attempt: int = 1) -> Answer:
    return Answer(worker, request_id, attempt, 200, None, None, {}, b"{}")


class Bench:
    """A dispatcher with recorded posts and outcomes."""

    def __init__(self) -> None:
        self.posts: list[tuple[str, Any]] = []
        self.outcomes: dict[str, list[Any]] = {}
        self.reachable = True
        self.timers: list[Callable[[], None]] = []
        self.dispatcher = Dispatcher(self.post, lambda _seconds, act: self.timers.append(act))

    def post(self, inbox: str, message: Any) -> bool:
        if self.reachable:
            self.posts.append((inbox, message))
        return self.reachable

    def submit(self, request_id: str) -> None:
        self.outcomes[request_id] = []
        self.dispatcher.submit(work(request_id), self.outcomes[request_id].append)

    def lose(self, worker: str, *, settle: bool = True) -> None:
        assert self.dispatcher.worker_lost(worker) == f"in-{worker}"
        if settle:
            self.settle()

    def settle(self) -> None:
        """Let the time pass after which requests of dead workers are tried again."""
        timers, self.timers = self.timers, []
        for act in timers:
            act()

    def credit(self, worker: str, count: int = 1) -> None:
        for _ in range(count):
            self.dispatcher.credit(Credit(worker, f"in-{worker}"))

    def given(self) -> list[tuple[str, str, int]]:
        """(inbox, request, attempt) of the work handed out since the last call."""
        found = [(inbox, m.request_id, m.attempt) for inbox, m in self.posts if isinstance(m, Work)]
        self.posts = [entry for entry in self.posts if not isinstance(entry[1], Work)]
        return found

    def cancelled(self) -> list[tuple[str, str]]:
        return [(inbox, m.request_id) for inbox, m in self.posts if isinstance(m, CancelWork)]


def test_work_is_handed_out_by_credit_oldest_first() -> None:
    bench = Bench()
    for request_id in "abc":
        bench.submit(request_id)
    assert (bench.given(), bench.dispatcher.waiting) == ([], 3)
    bench.credit("w")
    assert bench.given() == [("in-w", "a", 1)]
    bench.credit("v")
    assert bench.given() == [("in-v", "b", 1)]
    bench.credit("w")
    assert bench.given() == [("in-w", "c", 1)]
    assert (bench.dispatcher.waiting, bench.dispatcher.running) == (0, 3)


def test_the_worker_that_holds_least_is_next() -> None:
    bench = Bench()
    bench.credit("w", 3)
    bench.credit("v", 3)
    for request_id in "abcd":
        bench.submit(request_id)
    assert sorted(inbox for inbox, _, _ in bench.given()) == ["in-v", "in-v", "in-w", "in-w"]


def test_answers_without_a_caller_are_counted() -> None:
    bench = Bench()
    bench.credit("w")
    bench.dispatcher.answer(answer("w", "unknown"))
    bench.submit("a")
    bench.dispatcher.answer(answer("w", "a"))
    bench.dispatcher.answer(answer("w", "a"))
    assert (bench.dispatcher.dropped, len(bench.outcomes["a"])) == (2, 1)


def test_what_a_dead_worker_held_goes_first() -> None:
    bench = Bench()
    bench.credit("w")
    bench.submit("a")
    bench.credit("w")
    bench.submit("b")
    bench.credit("w")  # both are prepared and wait for the engine
    bench.given()
    bench.lose("w", settle=False)
    bench.submit("c")
    bench.settle()
    for _ in range(3):
        bench.credit("x")
    assert bench.given() == [("in-x", "a", 2), ("in-x", "b", 2), ("in-x", "c", 1)]


def test_the_request_in_preparation_is_to_blame_alone() -> None:
    """Twice: then it fails, and those that waited for the engine beside it are tried on and on."""
    bench = Bench()
    bench.credit("w")
    bench.submit("innocent")
    for worker, following in (("w", "x"), ("x", "y")):
        bench.credit(worker)
        if worker == "w":
            bench.submit("poison")
        bench.given()
        bench.lose(worker)
        bench.credit(following)
    (outcome,) = bench.outcomes["poison"]
    assert (outcome.code, outcome.status) == ("engine_error", 500)
    assert bench.given() == [("in-y", "innocent", 1)]
    assert bench.outcomes["innocent"] == []


def test_workers_that_die_together_are_one_death() -> None:
    """The request of the first is not given to the second, which is dead as well."""
    bench = Bench()
    bench.credit("w", 2)
    bench.credit("x")
    bench.submit("a")
    bench.given()
    bench.lose("w", settle=False)
    bench.lose("x", settle=False)
    bench.credit("y")
    assert bench.given() == []
    bench.settle()
    assert bench.given() == [("in-y", "a", 2)]


def test_without_a_request_in_preparation_all_are_to_blame() -> None:
    bench = Bench()
    for worker in "wx":
        bench.credit(worker)
        if worker == "w":
            bench.submit("a")
        bench.credit(worker)
        bench.lose(worker)
    (outcome,) = bench.outcomes["a"]
    assert outcome.code == "engine_error"


def test_a_cancelled_request_may_be_the_one_to_blame() -> None:
    bench = Bench()
    bench.credit("w")
    bench.submit("innocent")
    bench.credit("w")
    bench.submit("poison")
    bench.dispatcher.cancel("poison")
    bench.lose("w")
    bench.credit("x")
    assert bench.given()[-1] == ("in-x", "innocent", 1)


def test_suspects_are_kept_apart_where_there_is_a_choice() -> None:
    bench = Bench()
    bench.credit("w", 2)
    bench.submit("a")
    bench.credit("w")
    bench.lose("w")
    bench.credit("x", 2)
    bench.given()
    bench.credit("y", 3)
    for request_id in "bc":
        bench.submit(request_id)
    assert bench.given() == [("in-y", "b", 1), ("in-y", "c", 1)]


def test_news_of_a_dead_worker_is_ignored() -> None:
    bench = Bench()
    bench.credit("w")
    bench.lose("w")
    bench.credit("w", 5)
    bench.submit("a")
    assert bench.given() == []


def test_late_answer_of_the_first_attempt_counts() -> None:
    bench = Bench()
    bench.credit("w")
    bench.submit("a")
    bench.lose("w")
    bench.credit("x")
    bench.dispatcher.answer(answer("w", "a", 1))
    assert len(bench.outcomes["a"]) == 1
    assert ("in-x", "a") in bench.cancelled()
    bench.dispatcher.answer(answer("x", "a", 2))
    assert len(bench.outcomes["a"]) == 1


def test_cancel_tells_the_worker_and_frees_the_queue() -> None:
    bench = Bench()
    bench.credit("w")
    for request_id in "abc":
        bench.submit(request_id)
    bench.dispatcher.cancel("a")
    bench.dispatcher.cancel("b")
    bench.dispatcher.cancel("unknown")
    assert bench.cancelled() == [("in-w", "a")]
    bench.credit("w")
    assert [request_id for _, request_id, _ in bench.given()] == ["a", "c"]
    assert bench.outcomes == {"a": [], "b": [], "c": []}


def test_fail_all_ends_and_cancels_everything() -> None:
    bench = Bench()
    bench.credit("w")
    bench.submit("a")
    bench.submit("b")
    error = RequestError("model_unavailable", "gone")
    bench.dispatcher.fail_all(error)
    assert bench.outcomes == {"a": [error], "b": [error]}
    assert bench.cancelled() == [("in-w", "a")]
    assert (bench.dispatcher.waiting, bench.dispatcher.running) == (0, 0)


def test_full_queue_of_a_worker_keeps_the_request() -> None:
    bench = Bench()
    bench.credit("w")
    bench.reachable = False
    bench.submit("a")
    assert bench.dispatcher.waiting == 1
    bench.reachable = True
    bench.credit("v")
    assert bench.given() == [("in-v", "a", 1)]


events = st.lists(
    st.tuples(st.sampled_from(["submit", "credit", "answer", "lose", "cancel", "fail"]), st.integers(0, 7)), max_size=60
)


@settings(max_examples=300, deadline=None)
@given(events)
def test_exactly_one_outcome_whatever_happens(script: list[tuple[str, int]]) -> None:
    """At the end every request has one outcome, or was cancelled and has none; nobody holds what is over."""
    bench = Bench()
    held: dict[str, str] = {}  # request → worker, as the workers know it
    cancelled: set[str] = set()
    alive = {f"w{n}" for n in range(8)}
    count = 0

    def note() -> None:
        for inbox, request_id, _attempt in bench.given():
            held[request_id] = inbox.removeprefix("in-")

    for event, number in script:
        worker = f"w{number}"
        if event == "submit":
            bench.submit(f"r{count}")
            count += 1
        elif event == "credit" and worker in alive:
            bench.credit(worker)
        elif event == "answer" and held:
            request_id = sorted(held)[number % len(held)]
            bench.dispatcher.answer(answer(held.pop(request_id), request_id))
        elif event == "lose":
            alive.discard(worker)
            for request_id in [r for r, w in held.items() if w == worker]:
                del held[request_id]
            bench.dispatcher.worker_lost(worker)
            if number % 2:
                bench.settle()
        elif event == "cancel" and count:
            request_id = f"r{number % count}"
            if not bench.outcomes[request_id]:
                cancelled.add(request_id)
            bench.dispatcher.cancel(request_id)
        elif event == "fail" and number == 0:
            bench.dispatcher.fail_all(RequestError("model_unavailable", "gone"))
        note()
    bench.settle()
    bench.credit("last", 1)
    note()
    for _ in range(3 * count + 3):  # one worker that never dies finishes everything
        for request_id, holder in list(held.items()):
            del held[request_id]
            bench.dispatcher.answer(answer(holder, request_id))
        bench.credit("last")
        note()
    assert {r for r, outcomes in bench.outcomes.items() if not outcomes} == cancelled
    assert all(len(outcomes) <= 1 for outcomes in bench.outcomes.values())
    assert (bench.dispatcher.waiting, bench.dispatcher.running) == (0, 0)


def nothing() -> None:
    """An eviction that nobody waits for."""


def test_places_are_one_and_the_queue() -> None:
    admission = Admission(queue=1)
    with admission.call():
        with admission.call():
            with pytest.raises(RequestError) as refused, admission.call():
                pass
            assert (refused.value.code, refused.value.status) == ("concurrency_limit", 429)
            assert refused.value.retry_after == 1
            with pytest.raises(RequestError), admission.reading(0.0, nothing):
                pass
        assert admission.calls == 1
        with admission.call():
            pass
    assert admission.calls == 0


def test_read_slots_are_twice_the_places() -> None:
    admission = Admission(queue=0)
    with admission.reading(0.0, nothing) as first, admission.reading(0.0, nothing) as second:
        assert first.slotted
        assert second.slotted
        with admission.reading(0.1, nothing) as hurried:
            assert not hurried.slotted
        assert admission.readings == 2
    assert admission.readings == 0


def test_slowest_sender_makes_room() -> None:
    admission = Admission(queue=0)
    evicted: list[str] = []
    with (
        admission.reading(0.0, lambda: evicted.append("slow")) as slow,
        admission.reading(0.0, lambda: evicted.append("fast")) as fast,
    ):
        slow.received, fast.received = 10, 1000
        with admission.reading(2.0, nothing) as newcomer:
            assert newcomer.slotted
            assert evicted == ["slow"]
            assert slow.evicted
            assert not fast.evicted
            assert admission.readings == 2
