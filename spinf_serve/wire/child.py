"""Messages that every child receives."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stop:
    """Leave now. The frontend answers what is still open first."""

    reason: str
