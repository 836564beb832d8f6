"""Counters of a running engine, for the metrics of whoever holds it."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class EngineStats:
    """Counters since the load; `samples` since they were last taken."""

    passes: int = 0
    packed_tokens: int = 0
    padded_tokens: int = 0
    busy_s: float = 0.0
    failed_passes: int = 0
    samples: list[tuple[int, float]] = field(default_factory=list)

    def ran(self, tokens: int, padded: int, seconds: float) -> None:
        """A pass of `tokens` real tokens in `padded` rows."""
        self.passes += 1
        self.packed_tokens += tokens
        self.padded_tokens += padded
        self.busy_s += seconds
        self.samples.append((tokens, tokens / padded))

    def take_samples(self) -> list[tuple[int, float]]:
        """(tokens, occupancy = real / padded tokens) of every pass since the last call; they are handed out once."""
        samples, self.samples = self.samples, []
        return samples
