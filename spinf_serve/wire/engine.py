"""Messages that the engine receives."""

from dataclasses import dataclass

from spinf_serve.config import EngineConfig
from spinf_serve.plan import ScorePlan


@dataclass(frozen=True, slots=True)
class EngineSetup:
    config: EngineConfig
    log_format: str


@dataclass(frozen=True, slots=True)
class ScoreJob:
    """A plan of `worker`, whose inbox is `reply_to`."""

    worker: str
    reply_to: str
    request_id: str
    attempt: int
    plan: ScorePlan


@dataclass(frozen=True, slots=True)
class CancelJob:
    worker: str
    request_id: str


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """A preprocess worker is dead: its plans need no pass any more."""

    worker: str
