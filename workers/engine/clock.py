"""How long a device that works beside the host had a pass: marks in its stream, which nobody waits for."""

from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Reads time where the passes run."""

    def mark(self) -> Any:
        """A point in the device's work, behind all that was queued so far."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Between two marks, once the work between them is done."""


class CudaClock:
    """Marks are events in the calling thread's stream, which is the one that passes are launched on."""

    def mark(self) -> torch.cuda.Event:
        """Queue an event; the device notes the time when it comes to it."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """To half a microsecond. The pass was read, so nothing is left to wait for but its last mark."""
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
