"""When a dead process is started again, and when the supervisor gives up. Plain objects; monotonic seconds."""

from collections import deque

ENGINE_CRASHES = (3, 600.0)
"""Exit code 3 at the third crash within 10 minutes."""
FAILED_STARTS = 5


class CrashWindow:
    """Gives up after `limit` crashes within `window_s`; the wait before a restart doubles from `first_s`."""

    def __init__(self, limit: int, window_s: float, first_s: float, most_s: float) -> None:
        self._limit = limit
        self._window_s = window_s
        self._first_s = first_s
        self._most_s = most_s
        self._crashes: deque[float] = deque()

    def crashed(self, now: float) -> float | None:
        """Record a crash: seconds to wait before the restart, or None to give up."""
        self._crashes.append(now)
        while now - self._crashes[0] > self._window_s:
            self._crashes.popleft()
        if len(self._crashes) >= self._limit:
            return None
        return float(min(self._most_s, self._first_s * 2 ** (len(self._crashes) - 1)))


class Replacements:
    """For processes that are replaced however often they are killed, but must come up.

    Gives up after `limit` deaths in a row before ready. The first `free` deaths shortly after ready are replaced at
    once (a request may take two workers with it), then each wait doubles: no loop burns the machine.
    """

    def __init__(self, limit: int, first_s: float, most_s: float, *, free: int = 3, short_s: float = 10.0) -> None:
        self._limit = limit
        self._first_s = first_s
        self._most_s = most_s
        self._free = free
        self._short_s = short_s
        self._failures = 0
        self._short_lives = 0

    def ready(self) -> None:
        """A process came up."""
        self._failures = 0

    def died(self, served_s: float | None) -> float | None:
        """A death `served_s` seconds after ready (None: before): seconds to wait, or None to give up."""
        if served_s is None:
            self._failures += 1
            return None if self._failures >= self._limit else self._wait(self._failures)
        self._short_lives = self._short_lives + 1 if served_s < self._short_s else 0
        return self._wait(self._short_lives - self._free)

    def _wait(self, count: int) -> float:
        return float(min(self._most_s, self._first_s * 2 ** min(count - 1, 30))) if count > 0 else 0.0
