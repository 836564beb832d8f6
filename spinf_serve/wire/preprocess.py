"""Messages that a preprocess worker receives."""

from dataclasses import dataclass

from spinf_serve.config import PreprocessConfig
from spinf_serve.plan import ScoreResult


@dataclass(frozen=True, slots=True)
class Peers:
    """Where the frontend and the engine listen now; an empty address while one is away."""

    frontend: str
    engine: str


@dataclass(frozen=True, slots=True)
class PreprocessSetup:
    config: PreprocessConfig
    log_format: str
    peers: Peers


@dataclass(frozen=True, slots=True)
class Work:
    """One accepted request. `received`: monotonic seconds (one clock for all processes) at which the body was whole."""

    request_id: str
    attempt: int  # 1, then 2 after its first worker died
    route: str  # score | chat | v0_score
    trusted: bool
    content_encoding: str | None
    received: float
    body: bytes


@dataclass(frozen=True, slots=True)
class CancelWork:
    """Nobody waits for the request any more."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Scored:
    request_id: str
    attempt: int
    result: ScoreResult


@dataclass(frozen=True, slots=True)
class Unscored:
    """The engine refused or failed this plan."""

    request_id: str
    attempt: int
    code: str
    message: str
    param: str | None
    retry_after: int | None
