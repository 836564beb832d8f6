"""Turns: one at a time, the device's thread first, and given back whatever happens."""

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from spinf_serve import turns as module
from spinf_serve.turns import Turns
from tests.support.interrupts import interrupted_everywhere

WAIT_S = 10


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def in_first[T](turns: Turns, work: Callable[[], T]) -> T:
    with turns.first():
        return work()


def test_one_at_a_time() -> None:
    turns, inside, worst = Turns(), [0], [0]

    def enter() -> None:
        inside[0] += 1
        worst[0] = max(worst[0], inside[0])
        time.sleep(0)
        inside[0] -= 1

    def work(is_first: bool) -> None:
        for _ in range(50):
            if is_first:
                in_first(turns, enter)
            else:
                turns.others(enter)

    threads = [threading.Thread(target=work, args=(is_first,)) for is_first in (True, False) * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert worst == [1]


@pytest.mark.parametrize("_round", range(8))
def test_the_first_go_before_those_who_waited_longer(_round: int) -> None:
    turns, order = Turns(), []
    others = [threading.Thread(target=turns.others, args=(lambda: order.append("other"),)) for _ in range(6)]
    engine = threading.Thread(target=in_first, args=(turns, lambda: order.append("engine")))

    def come() -> None:
        for thread in [*others, engine]:
            thread.start()
            until(lambda: waits(thread))  # noqa: B023

    turns.others(come)
    for thread in [*others, engine]:
        thread.join(WAIT_S)
    assert order == ["engine", *["other"] * 6]


def waits(thread: threading.Thread) -> bool:
    """Whether it is at one of the locks: the innermost function that it runs is written here."""
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and frame.f_code.co_filename == module.__file__


@pytest.mark.parametrize("take", [in_first, Turns.others], ids=["first", "others"])
def test_a_turn_that_raises_is_given_back(take: Callable[..., Any]) -> None:
    turns = Turns()
    with pytest.raises(ZeroDivisionError):
        take(turns, lambda: 1 // 0)
    assert turns.others(lambda: 5) == 5
    assert in_first(turns, lambda: 6) == 6


def test_a_turn_is_given_back_wherever_it_is_interrupted() -> None:
    turns = Turns()
    interrupts = 0
    for _interrupt in interrupted_everywhere(lambda: turns.others(lambda: len("work"))):
        interrupts += 1
        taken = [lock.locked() for lock in (turns._turn, turns._first, turns._next)]
        assert not any(taken), f"place {interrupts}"
    assert interrupts > 2
