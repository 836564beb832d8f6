"""Who gets into the next pass: equal shares, oldest first, nobody starves. No model."""

from collections import Counter
from collections.abc import Hashable

import pytest

from spinf_serve.plan import ScorePlan
from tests.engine.support import Job, Question, make_plan
from workers.engine.packing import Share
from workers.engine.scheduler import Scheduler


def plan_of(content: int, questions: int, length: int = 10, jobs: int = 1) -> ScorePlan:
    """Jobs of a content and questions of `length` tokens that share nothing."""
    job = Job(
        (2, *[30] * (content - 1)),
        tuple(Question((100 + i, *[50] * (length - 1)), ((60,),)) for i in range(questions)),
    )
    return make_plan([job] * jobs)[0]


def tokens_of(shares: list[Share]) -> Counter[Hashable]:
    counts: Counter[Hashable] = Counter()
    for share in shares:
        counts[share.key] += share.piece.tokens
    return counts


def run(scheduler: Scheduler, most: int = 10_000) -> list[Counter[Hashable]]:
    """Tokens per request of every pass until nothing waits."""
    out = []
    while len(scheduler):
        out.append(tokens_of(scheduler.next_pass()))
        assert out[-1]
        assert len(out) < most
    return out


def test_nothing_waits() -> None:
    assert Scheduler(100, 200).next_pass() == []


def test_small_requests_share_a_pass() -> None:
    scheduler = Scheduler(1000, 2000)
    for key in "abc":
        scheduler.add(key, plan_of(50, 5))
    assert run(scheduler) == [Counter(a=100, b=100, c=100)]


def test_a_large_request_does_not_starve_small_ones() -> None:
    scheduler = Scheduler(1000, 2000)
    scheduler.add("large", plan_of(100, 2000))
    scheduler.next_pass()
    scheduler.add("small", plan_of(50, 5))
    assert tokens_of(scheduler.next_pass())["small"] == 100


def test_the_large_request_gets_what_small_ones_leave() -> None:
    scheduler = Scheduler(1000, 2000)
    scheduler.add("small", plan_of(50, 5))
    scheduler.add("large", plan_of(100, 2000))
    assert tokens_of(scheduler.next_pass()) == Counter(small=100, large=900)


def test_equal_shares_of_equal_requests() -> None:
    scheduler = Scheduler(1000, 2000)
    for key in "abcd":
        scheduler.add(key, plan_of(10, 500))
    first = tokens_of(scheduler.next_pass())
    assert all(240 <= first[key] <= 260 for key in "abcd"), first


def test_what_is_left_goes_to_the_oldest() -> None:
    scheduler = Scheduler(1000, 2000)
    scheduler.add("old", plan_of(10, 500))
    scheduler.add("young", plan_of(10, 500, length=190))
    first = tokens_of(scheduler.next_pass())
    assert first == Counter(old=610, young=390)  # the young one cannot use 110 of its 500


def test_a_large_piece_is_not_starved_by_small_requests() -> None:
    """A content of most of the budget waits only until its shares add up, while small requests keep coming."""
    scheduler = Scheduler(1000, 2000)
    scheduler.add("stream", plan_of(10, 3000))
    scheduler.add("big", plan_of(900, 2))
    for number in range(20):
        scheduler.add(f"small{number}", plan_of(40, 6))
        if "big" in tokens_of(scheduler.next_pass()):
            break
    assert number < 4


def test_a_large_piece_is_not_starved_by_an_older_request() -> None:
    scheduler = Scheduler(1000, 2000)
    scheduler.add("old", plan_of(10, 3000))
    scheduler.next_pass()
    scheduler.add("big", plan_of(900, 2))
    turns = [tokens_of(scheduler.next_pass()) for _ in range(3)]
    assert any("big" in turn for turn in turns), turns


def test_a_piece_over_the_budget_runs_alone() -> None:
    scheduler = Scheduler(1000, 3000)
    scheduler.add("huge", plan_of(2000, 5))
    scheduler.add("small", plan_of(50, 5))
    seen = run(scheduler)
    assert Counter(huge=2050) in seen
    assert sum(turn["small"] for turn in seen) == 100


def test_pieces_over_the_budget_do_not_shut_others_out() -> None:
    """A request of many contents over the budget, oldest of all: others still run between its passes."""
    scheduler = Scheduler(1000, 3000)
    scheduler.add("huge", plan_of(1500, 5, jobs=20))
    scheduler.next_pass()
    scheduler.add("small", plan_of(50, 5))
    turns = [tokens_of(scheduler.next_pass()) for _ in range(3)]
    assert any(turn["small"] for turn in turns), turns


def test_a_piece_over_the_budget_is_not_starved() -> None:
    scheduler = Scheduler(1000, 3000)
    scheduler.add("stream", plan_of(10, 3000))
    scheduler.add("huge", plan_of(2000, 5))
    turns = [tokens_of(scheduler.next_pass()) for _ in range(5)]
    assert any(turn["huge"] for turn in turns), turns


@pytest.mark.parametrize("budget", [50, 333, 1000])
def test_all_tokens_run_and_passes_stay_within_the_budget(budget: int) -> None:
    scheduler = Scheduler(budget, 3000)
    plans = {"a": plan_of(40, 30), "b": plan_of(1, 100), "c": plan_of(30, 3, jobs=9), "d": plan_of(45, 1, length=200)}
    for key, plan in plans.items():
        scheduler.add(key, plan)
    total: Counter[Hashable] = Counter()
    for turn in run(scheduler):
        assert sum(turn.values()) <= budget or len(turn) == 1
        total += turn
    for key, plan in plans.items():
        assert total[key] == len(plan.tokens)  # questions of these plans share nothing: nothing is replayed


def test_removed_requests_run_nothing() -> None:
    scheduler = Scheduler(100, 200)
    scheduler.add("a", plan_of(10, 50))
    scheduler.add("b", plan_of(10, 50))
    scheduler.next_pass()
    scheduler.remove("a")
    scheduler.remove("unknown")
    assert all(turn.keys() == {"b"} for turn in run(scheduler))


def test_requests_that_may_not_share_a_pass_take_turns() -> None:
    scheduler = Scheduler(100, 300, shared=False)
    scheduler.add("large", plan_of(10, 50))
    scheduler.add("huge", plan_of(150, 2))
    scheduler.add("small", plan_of(10, 3))
    turns = [tokens_of(scheduler.next_pass())]
    scheduler.add("late", plan_of(10, 3))
    turns += run(scheduler)
    assert all(len(turn) == 1 for turn in turns)
    order = [next(iter(turn)) for turn in turns]
    assert order[:5] == ["large", "huge", "small", "large", "late"]
    assert set(order[5:]) == {"large"}
    assert all(sum(turn.values()) <= 100 for turn in turns if "huge" not in turn)


def test_waiting_tokens_are_counted_down() -> None:
    scheduler = Scheduler(100, 200)
    scheduler.add("a", plan_of(10, 50))
    waiting = [scheduler.tokens_waiting]
    while len(scheduler):
        scheduler.next_pass()
        waiting.append(scheduler.tokens_waiting)
    assert waiting[0] == 510
    assert waiting[-1] == 0
    assert waiting == sorted(waiting, reverse=True)
