"""Messages that the supervisor receives. `sender` is a child's name, `<role>-<pid>`."""

from dataclasses import dataclass, replace
from typing import Any

from spinf_serve.plan import F32, EngineInfo


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a child: who it is and where its inbox is bound."""

    sender: str
    role: str
    pid: int
    inbox: str


@dataclass(frozen=True, slots=True)
class ChildReady:
    """The child can work. Only the engine sends `info`."""

    sender: str
    info: EngineInfo | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """One line about a long step, for the log; proves that a load moves."""

    sender: str
    text: str


@dataclass(frozen=True, slots=True)
class Fatal:
    """Last act of a child that cannot go on. `curable`: a restart may help."""

    sender: str
    reason: str
    curable: bool


@dataclass(frozen=True, slots=True)
class Beat:
    """Heartbeat from a thread. `busy_s`: seconds that the main loop has been in its current step, 0.0 when it waits."""

    sender: str
    busy_s: float


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the engine's start, gauges of the moment, and what was sampled since the last message.

    pass_tokens [P] float32 real tokens of each pass; pass_occupancy [P] float32 real / padded tokens.
    """

    sender: str
    numbers: dict[str, Any]
    pass_tokens: F32
    pass_occupancy: F32

    def without_samples(self) -> "EngineStats":
        """Counters and gauges alone: they may be told twice."""
        return replace(self, pass_tokens=self.pass_tokens[:0], pass_occupancy=self.pass_occupancy[:0])


@dataclass(frozen=True, slots=True)
class Degraded:
    """The engine answers what it has and then ends, to be started again; the reason is for people."""

    sender: str
    reason: str


@dataclass(frozen=True, slots=True)
class DrainRequest:
    """A trusted caller's POST (True) or DELETE (False) /v0/drain."""

    sender: str
    draining: bool


@dataclass(frozen=True, slots=True)
class InFlight:
    """The frontend's count of calls that still need an answer, sent on every change while the server stops."""

    sender: str
    calls: int
