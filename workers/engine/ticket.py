"""What the engine keeps of one submitted plan until its result is handed out."""

import time
from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np

from spinf_serve.plan import F32, ScorePlan, ScoreResult


@dataclass(slots=True)
class Ticket:
    """Times are monotonic seconds. `key` is the caller's. `logprobs` is NaN where no pass has written yet."""

    key: Hashable
    plan: ScorePlan
    logprobs: F32 = field(init=False)
    received: float = field(default_factory=time.monotonic)
    first_pass: float = 0.0
    last_pass: float = 0.0
    busy: float = 0.0
    packed_tokens: int = 0
    passes: int = 0
    shared_pass: bool = False

    def __post_init__(self) -> None:
        self.logprobs = np.full(len(self.plan.cols), np.nan, dtype=np.float32)

    def ran(self, started: float, ended: float, tokens: int, pass_tokens: int) -> None:
        """Account for a pass of `pass_tokens` real tokens, `tokens` of them this plan's."""
        self.first_pass = self.first_pass if self.passes else started
        self.last_pass = ended
        self.busy += (ended - started) * tokens / pass_tokens
        self.packed_tokens += tokens
        self.passes += 1
        self.shared_pass |= tokens < pass_tokens

    def result(self, fingerprint: str) -> ScoreResult:
        """The plan's result once every pass of it has run."""
        waited = (self.first_pass - self.received) if self.passes else 0.0
        return ScoreResult(
            logprobs=self.logprobs,
            fingerprint=fingerprint,
            packed_tokens=self.packed_tokens,
            passes=self.passes,
            shared_pass=self.shared_pass,
            queue_ms=waited * 1e3,
            score_ms=(self.last_pass - self.first_pass) * 1e3,
            busy_ms=self.busy * 1e3,
        )
