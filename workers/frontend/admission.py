"""Who comes in: 1 + queue calls with a whole body, and twice as many whose bodies are still arriving. Plain objects."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from spinf_serve.protocol.errors import RequestError

RETRY_AFTER_S = 1
PATIENCE_S = 1.0
"""A sender is left alone for this long; later the slowest one makes room when every read slot is taken."""
GRACE_S = 0.5
GRACE_BYTES = 64 << 10
"""Without a slot a body may still come in: at once, and within what the HTTP library holds in memory anyway."""


@dataclass(eq=False)
class Reading:
    """A body on its way. `evict` ends the wait for it."""

    started: float
    evict: Callable[[], None]
    slotted: bool
    received: int = 0
    evicted: bool = False

    def rate(self, now: float) -> float:
        """Bytes per second since the start."""
        return self.received / max(now - self.started, 1e-3)


class Admission:
    """Counts permits; everything happens in one thread."""

    def __init__(self, queue: int) -> None:
        self._most_calls = 1 + queue
        self._most_readings = 2 * self._most_calls
        self._readings: set[Reading] = set()
        self.calls = 0

    @property
    def readings(self) -> int:
        return len(self._readings)

    @contextmanager
    def reading(self, now: float, evict: Callable[[], None]) -> Iterator[Reading]:
        """A read slot, held while a body arrives. Raises `concurrency_limit`.

        Slow senders cannot close the server: where all slots are taken the slowest sender loses his, and before one
        counts as slow a newcomer is read without a slot, if he hurries.
        """
        self._refuse_when_full()
        if len(self._readings) >= self._most_readings:
            self._evict_slowest(now)
        mine = Reading(now, evict, slotted=len(self._readings) < self._most_readings)
        if mine.slotted:
            self._readings.add(mine)
        try:
            yield mine
        finally:
            self._readings.discard(mine)

    def _evict_slowest(self, now: float) -> None:
        slow = [reading for reading in self._readings if now - reading.started >= PATIENCE_S]
        if not slow:
            return
        victim = min(slow, key=lambda reading: reading.rate(now))
        victim.evicted = True
        self._readings.discard(victim)
        victim.evict()

    @contextmanager
    def call(self) -> Iterator[None]:
        """A place in the server, taken once the body is whole. Raises `concurrency_limit`."""
        self._refuse_when_full()
        self.calls += 1
        try:
            yield
        finally:
            self.calls -= 1

    def _refuse_when_full(self) -> None:
        if self.calls >= self._most_calls:
            raise busy("the server is working on as many requests as it accepts")


def busy(message: str) -> RequestError:
    """429: the caller should come back."""
    return RequestError("concurrency_limit", message, retry_after=RETRY_AFTER_S)
