"""Signals of the supervisor: handlers only record, the loop acts."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType

STOP = (signal.SIGTERM, signal.SIGINT)


class Signals:
    """Records SIGTERM, SIGINT, SIGHUP and SIGCHLD; `fd` becomes readable when one came. For the main thread."""

    def __init__(self) -> None:
        self._seen: list[int] = []
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # A closed terminal stops the server like Ctrl-C; a daemon that is sent SIGHUP by habit keeps serving.
        self.hangup_stops = sys.stderr.isatty()
        wanted = (*STOP, signal.SIGCHLD, signal.SIGHUP)
        # What the starting process ignored on purpose (nohup) stays ignored.
        handled = tuple(n for n in wanted if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN)
        self._before = {number: signal.signal(number, self._record) for number in handled}
        self._wakeup_before = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)

    @property
    def fd(self) -> int:
        """To be polled."""
        return self._read_fd

    def _record(self, number: int, _frame: FrameType | None) -> None:
        self._seen.append(number)

    def take(self) -> list[int]:
        """The signals since the last call, oldest first."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._read_fd, 512):
                pass
        seen, self._seen = self._seen, []
        return seen

    def restore(self) -> None:
        """Put back the handlers that were there before."""
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._read_fd)
        os.close(self._write_fd)


@contextlib.contextmanager
def blocked_for_child() -> Iterator[None]:
    """While a child is started: it inherits the blocked signals and unblocks them once it ignores them."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
