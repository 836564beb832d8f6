"""A stand-in for the engine: the same surface, numbers without meaning, no torch. One plan a step."""

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from spinf_serve.config import EngineConfig
from spinf_serve.plan import Completion, EngineInfo, ScorePlan, ScoreResult


class ScoringEngine:
    """Log-probabilities of a plan depend on its columns alone."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.info = EngineInfo(
            *("fp_0000000000", "f32", True, "light", None, config.token_budget, config.max_tokens, 1000), versions={}
        )
        self._plans: dict[Hashable, ScorePlan] = {}
        self._samples: list[tuple[int, float]] = []
        self.degraded: str | None = None

    @classmethod
    def load(cls, config: EngineConfig, on_progress: Callable[[str], None] | None = None) -> "ScoringEngine":
        if on_progress is not None:
            on_progress("nothing to load")
        return cls(config)

    def warm_up(self, on_progress: Callable[[str], None] | None = None) -> None:
        """Nothing to warm up."""

    @property
    def has_work(self) -> bool:
        return bool(self._plans)

    def submit(self, key: Hashable, plan: ScorePlan) -> None:
        self._plans[key] = plan

    def cancel(self, key: Hashable) -> None:
        self._plans.pop(key, None)

    def step(self, arrivals: Callable[[], None] | None = None) -> list[Completion]:
        if not self._plans:
            return []
        key = next(iter(self._plans))
        plan = self._plans.pop(key)
        self._samples.append((len(plan.tokens), 1.0))
        logprobs = (-1.0 - (plan.cols % 7)).astype(np.float32)
        result = ScoreResult(logprobs, self.info.fingerprint, packed_tokens=len(plan.tokens), passes=1)
        return [Completion(key, result=result)]

    def stats(self) -> dict[str, Any]:
        samples, self._samples = self._samples, []
        return {"busy_s": 0.0, "pass_samples": samples}

    def close(self) -> None:
        """Nothing to free."""
