"""Plans that fit the memory alone and not together: none is refused for what others stored."""

from collections.abc import Callable, Iterable

import numpy as np
import pytest

from spinf_serve.plan import F32, Completion, ScorePlan
from tests.engine.fakes import FakeAllocator, FakeRunner, FakeStaged, fake_engine
from tests.engine.support import drain, make_plan, random_jobs, run_all
from workers.engine.engine import ScoringEngine

CONTENT = 60
ROOM = 100  # content tokens that can be stored: one content and not two


def a_plan(seed: int, content: int = CONTENT, questions: int = 60) -> ScorePlan:
    """Its questions need several passes, between which the content is stored."""
    return make_plan(random_jobs(seed, 800, [content], questions))[0]


def small_card(runner: FakeRunner) -> Callable[[FakeStaged], Exception | None]:
    def fault(staged: FakeStaged) -> Exception | None:
        return RuntimeError("CUDA out of memory.") if sum(runner.stored.values()) > ROOM else None

    return fault


def an_engine(where: str = "launch_fault", *, invariant: bool = True) -> tuple[ScoringEngine, FakeRunner]:
    runner = FakeRunner()
    setattr(runner, where, small_card(runner))
    return fake_engine(runner, FakeAllocator(), invariant=invariant), runner


def numbers(completions: Iterable[Completion]) -> dict[str, F32]:
    """Results by key; nothing may have failed, and nothing may be told twice."""
    out: dict[str, F32] = {}
    for one in completions:
        assert one.error is None, one.error
        assert one.result is not None
        assert one.key not in out
        assert np.isfinite(one.result.logprobs).all()
        out[one.key] = one.result.logprobs
    return out


@pytest.mark.parametrize("invariant", [True, False])
@pytest.mark.parametrize("where", ["launch_fault", "wait_fault"])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_plans_that_fit_alone_all_get_their_results(
    count: int, where: str, invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = {f"r{i}": a_plan(i) for i in range(count)}
    alone = {key: numbers(run_all(an_engine()[0], {key: plan}).values())[key] for key, plan in plans.items()}
    engine, runner = an_engine(where, invariant=invariant)
    set_apart: list[int] = []
    failed = engine._apart.failed

    def noted(number: int) -> None:
        set_apart.append(number)
        failed(number)

    monkeypatch.setattr(engine._apart, "failed", noted)
    for key, plan in plans.items():
        engine.submit(key, plan)
    together = numbers(drain(engine))
    assert together.keys() == plans.keys()
    assert all(np.array_equal(together[key], alone[key]) for key in plans)
    assert not runner.stored
    assert engine.degraded is None
    assert len(set(set_apart)) == len(set_apart) > 0, "who is set apart has the memory to itself the next time"


def test_another_error_beside_stores_fails_at_once() -> None:
    engine, runner = an_engine()
    engine.submit("a", a_plan(1))
    while not runner.stored:
        engine.step()
    guilty = a_plan(2, 10, 2)
    runner.launch_fault = lambda staged: (
        RuntimeError("no kernel") if any(share.plan is guilty for share in staged.packed.shares) else None
    )
    engine.submit("guilty", guilty)
    found = {one.key: one.error is None for one in drain(engine)}
    assert found == {"a": True, "guilty": False}
    assert len(runner.order("launch")) == len(runner.order("wait"))
    assert not engine._apart


def test_one_that_does_not_fit_alone_is_refused_and_the_others_are_not() -> None:
    engine, runner = an_engine()
    completions = run_all(engine, {"a": a_plan(1), "large": a_plan(2, ROOM + 1), "b": a_plan(3)})
    assert {key: c.error is None for key, c in completions.items()} == {"a": True, "large": False, "b": True}
    assert getattr(completions["large"].error, "code", None) == "request_too_large"
    assert not runner.stored


def test_who_comes_later_waits_and_runs_without_being_asked_for() -> None:
    engine, runner = an_engine()
    engine.submit("a", a_plan(1))
    engine.submit("b", a_plan(2))
    found: list[Completion] = []
    while not engine._apart:
        found += engine.step()
    engine.submit("later", a_plan(3))
    engine.submit("small", a_plan(4, 10, 2))
    assert engine._apart
    found += drain(engine)
    assert numbers(found).keys() == {"a", "b", "later", "small"}
    assert not runner.stored
    engine.submit("after", a_plan(5))
    assert numbers(drain(engine)).keys() == {"after"}
    assert not engine._apart


@pytest.mark.parametrize("who", ["a", "b", "later"])
def test_who_leaves_is_forgotten(who: str) -> None:
    engine, runner = an_engine()
    engine.submit("a", a_plan(1))
    engine.submit("b", a_plan(2))
    found: list[Completion] = []
    while not engine._apart:
        found += engine.step()
    engine.submit("later", a_plan(3))
    engine.cancel(who)
    found += drain(engine)
    assert numbers(found).keys() == {"a", "b", "later"} - {who}
    assert not runner.stored
    assert not engine.has_work
    engine.submit(who, a_plan(4))
    assert numbers(drain(engine)).keys() == {who}
