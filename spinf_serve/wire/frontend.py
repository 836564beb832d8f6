"""Messages that the frontend receives."""

from dataclasses import dataclass
from typing import Any

from spinf_serve.config import FrontendConfig, PackFile
from spinf_serve.plan import EngineInfo


@dataclass(frozen=True, slots=True)
class Serving:
    """What the supervisor knows about the server; the whole state, every time it changes."""

    phase: str = "loading"  # loading | ready | restarting | failed
    draining: bool = False  # asked for by /v0/drain: not ready, everything is still answered
    stopping: bool = False  # a signal came: new calls are refused
    live: bool = False  # ready once, and not given up
    error: str | None = None
    degraded: str | None = None  # why the engine is about to be restarted: new calls are refused
    info: EngineInfo | None = None  # of the last engine that was ready
    revision: str | None = None  # of the weights, once the snapshot is found
    engine_restarts: int = 0
    workers_lost: int = 0


@dataclass(frozen=True, slots=True)
class FrontendSetup:
    """`listeners` are inherited descriptors of listening TCP sockets."""

    config: FrontendConfig
    log_format: str
    listeners: tuple[int, ...]
    serving: Serving


@dataclass(frozen=True, slots=True)
class Packs:
    """The prompt packs of the server, once they are loaded. `listing`: the body of GET /v1/packs."""

    files: tuple[PackFile, ...]
    listing: bytes


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A preprocess worker is dead: what it held must go elsewhere, and nothing it still says counts."""

    worker: str


@dataclass(frozen=True, slots=True)
class Credit:
    """The worker can take one more request."""

    worker: str
    inbox: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The final reply to a request, as bytes. `code` is the error code, None with status 200."""

    worker: str
    request_id: str
    attempt: int
    status: int
    code: str | None
    retry_after: int | None
    facts: dict[str, Any]  # counts and times for the log line and the metrics, never content
    body: bytes
