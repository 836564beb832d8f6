"""Whose turn it is to compute on the host, where several threads of one process want to.

Python lets threads compute in slices of some milliseconds. A thread that launches a pass gives the interpreter up at
every call into the device's libraries, and waits a slice of everybody else's work each time: the device starves. Here
threads take whole turns, one at a time, and the one that feeds the device goes before all others.

The others may be interrupted anywhere (Ctrl-C), and a turn that is not given back ends the engine. Hence plain locks,
each held by a `with` that is not left before its end: between such a lock and its `with` Python takes no signal, while
a context manager written in Python can be interrupted before it has let go.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Turns:
    """One turn at a time; that of `first` before those of `others`. Never ask for one inside of another."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._first = threading.Lock()  # held by who goes first, while it waits and while it computes
        self._next = threading.Lock()  # held by the one of the others who is next, and while it computes

    @contextmanager
    def first(self) -> Iterator[None]:
        """A turn as soon as the running one ends. For threads that nothing interrupts, one at a time."""
        with self._first, self._turn:
            yield

    def others[T](self, work: Callable[[], T]) -> T:
        """Do the work in a turn when nobody waits in `first`."""
        with self._next:
            with self._first:
                pass
            with self._turn:
                return work()
