"""What the engine asks of a runner, and how long passes take: when the next one is to follow the running one."""

import math
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from spinf_serve.plan import F32
from workers.engine.clock import Clock
from workers.engine.packing import PackedPass, Share


class PendingPass(Protocol):
    """A pass that the device runs, or will run after those before it."""

    def done(self) -> bool:
        """Whether `wait` would return at once."""

    def wait(self) -> F32:
        """log P of every entry [C]. Raises what the pass raised."""


class AnyRunner(Protocol):
    """`runner.Runner`, `cuda_runner.CudaRunner`. A staged pass has `packed` and `padded_tokens`, else it is theirs."""

    def stage(self, packed: PackedPass) -> Any:
        """Everything a pass needs, on the device. May run in another thread than the rest."""

    def run(self, staged: Any) -> F32:
        """One forward pass → log P of every entry [C]."""

    def free(self, key: Hashable) -> None:
        """Drop every stored content of a request."""

    def free_job(self, key: Hashable, job: int) -> None:
        """Drop one job's content, if it is stored."""

    @property
    def stored_bytes(self) -> int:
        """Bytes of all stored contents."""

    def close(self) -> None:
        """Drop everything."""


class AsyncRunner(AnyRunner, Protocol):
    """A runner whose device works beside the host: passes run in the order of their launch."""

    def launch(self, staged: Any) -> PendingPass:
        """Start a pass, or queue it behind those that run."""


@dataclass(frozen=True, slots=True)
class _RunsInWait:
    """A pass of a runner that has no device of its own: it runs when its values are asked for."""

    runner: AnyRunner
    staged: Any

    def done(self) -> bool:
        return True

    def wait(self) -> F32:
        return self.runner.run(self.staged)


@dataclass(frozen=True, slots=True)
class InFlight:
    """A launched pass whose values were not read yet.

    launched  monotonic seconds when the launch began: a small pass is over when it ends
    took      seconds that the device had it, once it was read; None where nobody but the host knows
    """

    staged: Any
    pending: PendingPass
    launched: float
    took: Callable[[], float] | None = None

    @property
    def shares(self) -> tuple[Share, ...]:
        """What it computes."""
        shares: tuple[Share, ...] = self.staged.packed.shares
        return shares

    @property
    def tokens(self) -> int:
        """Real tokens."""
        return len(self.staged.packed.tokens)

    def times(self, free: float) -> tuple[float, float]:
        """From when to when it ran, in monotonic seconds, right after it was read. free: the end of the pass before.

        The host sees an end late while it launches another pass; what the device says counts more.
        """
        started, seen = max(self.launched, free), time.monotonic()
        return started, seen if self.took is None else min(seen, started + self.took())

    def holds(self, key: Hashable) -> bool:
        """Whether it computes anything for this request."""
        return any(share.key == key for share in self.shares)


def launch(runner: AnyRunner, staged: Any, clock: Clock | None = None) -> InFlight:
    """Start a pass, on a device that works beside the host where there is one. clock: that device's."""
    start = getattr(runner, "launch", None)
    began = time.monotonic()
    first = None if clock is None else clock.mark()
    pending: PendingPass = _RunsInWait(runner, staged) if start is None else start(staged)
    took = None if clock is None else partial(clock.seconds, first, clock.mark())
    return InFlight(staged, pending, began, took)


@dataclass(slots=True)
class Pace:
    """How long passes took lately, by the power of two of their tokens, and how long it took to get one ready."""

    _seconds: dict[int, float] = field(default_factory=dict)
    _stage_s: float = 0.0
    _wait_s: float = 0.0
    _launch_s: float = math.inf

    def ran(self, tokens: int, seconds: float) -> None:
        """A pass took so long. The last ones count most."""
        size = tokens.bit_length()
        per_token = seconds / tokens
        self._seconds[size] = (self._seconds.get(size, per_token) + per_token) / 2

    def staged(self, seconds: float) -> None:
        """Packing and staging a pass took so long. The longest counts, and fades."""
        self._stage_s = max(seconds, 0.9 * self._stage_s)

    def waited(self, seconds: float) -> None:
        """It took so long until it was the launching thread's turn. The longest counts, and fades."""
        self._wait_s = max(seconds, 0.9 * self._wait_s)

    def launched(self, seconds: float) -> None:
        """Launching a pass took so long. The shortest counts: a full queue of the device holds a launch up."""
        self._launch_s = min(seconds, 1.1 * self._launch_s)

    def left(self, tokens: int, elapsed: float) -> float:
        """Seconds that a pass of so many tokens will still take; 0 where no such pass ran yet."""
        return max(0.0, self._seconds.get(tokens.bit_length(), -math.inf) * tokens - elapsed)

    @property
    def launch_lead(self) -> float:
        """How long before the end of a pass a staged one has to be launched. Not earlier: queues have an end."""
        return 0.002 + self._wait_s + (1.5 * self._launch_s if self._launch_s < math.inf else 0.0)

    @property
    def lead(self) -> float:
        """How long before the end of a pass the next one has to be begun."""
        return self.launch_lead + 1.5 * self._stage_s
