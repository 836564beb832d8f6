"""Whose turn it is to compute on the host, where several threads of one process want to.

Python lets threads compute in slices of some milliseconds. A thread that launches a pass gives the interpreter up at
every call into the device's libraries, and waits a slice of everybody else's work each time: the device starves. Here
threads take whole turns, one at a time, and the one that feeds the device goes before all others.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """One turn at a time; those of `first` before those of `others`. Never ask for one inside of another."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._taken = False
        self._first_waiting = 0

    @contextmanager
    def first(self) -> Iterator[None]:
        """A turn as soon as the running one ends."""
        with self._changed:
            self._first_waiting += 1
            try:
                self._changed.wait_for(lambda: not self._taken)
                self._taken = True
            finally:
                self._first_waiting -= 1
        yield from self._turn()

    @contextmanager
    def others(self) -> Iterator[None]:
        """A turn when nobody waits in `first`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._taken and not self._first_waiting)
            self._taken = True
        yield from self._turn()

    def _turn(self) -> Iterator[None]:
        try:
            yield
        finally:
            with self._changed:
                self._taken = False
                self._changed.notify_all()
