"""Turns: one at a time, the device's thread first, and given back whatever happens."""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import pytest

from spinf_serve.turns import Turns

WAIT_S = 10


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_one_at_a_time() -> None:
    turns, inside, worst = Turns(), [0], [0]

    def work(turn: Callable[[], AbstractContextManager[None]]) -> None:
        for _ in range(50):
            with turn():
                inside[0] += 1
                worst[0] = max(worst[0], inside[0])
                time.sleep(0)
                inside[0] -= 1

    threads = [threading.Thread(target=work, args=(turn,)) for turn in (turns.first, turns.others) * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert worst == [1]


@pytest.mark.parametrize("_round", range(8))
def test_the_first_go_before_those_who_waited_longer(_round: int) -> None:
    turns, order, threads = Turns(), [], []

    def work(name: str, turn: Callable[[], AbstractContextManager[None]]) -> None:
        with turn():
            order.append(name)

    with turns.others():
        for count, (name, turn) in enumerate([*[("other", turns.others)] * 6, ("engine", turns.first)], 1):
            threads.append(threading.Thread(target=work, args=(name, turn)))
            threads[-1].start()
            until(partial(waits, turns, count))
    for thread in threads:
        thread.join(WAIT_S)
    assert order == ["engine", *["other"] * 6]


def waits(turns: Turns, count: int) -> bool:
    return len(turns._changed._waiters) == count  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["first", "others"])
def test_a_turn_that_raises_is_given_back(name: str) -> None:
    turns = Turns()
    with pytest.raises(ZeroDivisionError), getattr(turns, name)():
        raise ZeroDivisionError
    with turns.others():
        pass
    with turns.first():
        pass
