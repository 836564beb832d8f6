"""How a long download is shown: lines for a log, a bar on a terminal."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

Say = Callable[[str], None]
Moved = Callable[[int, int], None]
"""Called with (bytes here, bytes in all)."""

LINE_EVERY_S = 10.0


@runtime_checkable
class ShowsTransfers(Protocol):
    """A receiver of progress messages that can show bytes better than in messages."""

    def __call__(self, message: str) -> None: ...
    def transfer(self, label: str) -> AbstractContextManager[Moved]: ...


def transfer(say: Say, label: str) -> AbstractContextManager[Moved]:
    """Show a transfer: on the bar of a receiver that has one, else as a line every ten seconds."""
    return say.transfer(label) if isinstance(say, ShowsTransfers) else contextlib.nullcontext(Lines(say, label))


def size_text(size: float) -> str:
    """A number of bytes for people, in the units of disks: 13.1 GB."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size:.0f} bytes"


class Lines:
    """Says at most every `every_s` seconds how far a transfer is, how fast, and how long it may still take."""

    def __init__(self, say: Say, label: str, every_s: float = LINE_EVERY_S) -> None:
        self._say, self._label, self._every_s = say, label, every_s
        self._last = 0.0
        self._before: int | None = None

    def __call__(self, done: int, total: int) -> None:
        """The transfer is at `done` of `total` bytes."""
        now = time.monotonic()
        if self._before is None:
            self._last, self._before = now, done
        if now - self._last < self._every_s or not total:
            return
        speed = (done - self._before) / (now - self._last)
        left = f", about {(total - done) / speed:.0f} s left" if speed > 0 else ""
        size = f"{size_text(done)} of {size_text(total)} ({100 * done // total} %)"
        self._say(f"{self._label}: {size}, {size_text(speed)}/s{left}")
        self._last, self._before = now, done


class Terminal:
    """Messages and a bar on standard error."""

    def __call__(self, message: str) -> None:
        """One line."""
        print(message, file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def transfer(self, label: str) -> Iterator[Moved]:
        """A bar, from the first bytes until the end."""
        from rich import progress
        from rich.console import Console

        columns = (
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.DownloadColumn(),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
        )
        with progress.Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(label, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)


def for_standard_error() -> Say:
    """A bar where a person watches, plain lines elsewhere."""
    if sys.stderr.isatty():
        return Terminal()
    return lambda message: print(message, file=sys.stderr, flush=True)
