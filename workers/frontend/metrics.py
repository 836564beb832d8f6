"""The Prometheus metrics, in a registry of their own. Every label has a fixed set of values; all series start at 0."""

from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from spinf_serve import __version__
from spinf_serve.protocol.errors import STATUS_OF_CODE
from spinf_serve.wire.frontend import Serving
from spinf_serve.wire.supervisor import EngineStats
from workers.frontend.call import CLIENT_GONE, Call
from workers.frontend.routes import OTHER, PACK, ROUTES, SCORING

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKENS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)
_SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 1.0)
_COUNTED = ("content", "query", "floor", "packed")
_MEMORY_PARTS = {"weights": "weights_bytes", "peak": "peak_bytes", "stored": "stored_bytes"}


class Metrics:
    """What the frontend counts itself, and what the engine and the supervisor report."""

    def __init__(self, model: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a time stamp beside every series is of no use to anybody here
        self._model = model
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._requests = Counter("spinf_requests_total", "finished calls", ["route", "status"], registry=registry)
        self._rejected = Counter("spinf_requests_rejected_total", "calls refused", ["code"], registry=registry)
        self._running = Gauge("spinf_requests_running", "calls at a worker or the engine", registry=registry)
        self._waiting = Gauge("spinf_requests_waiting", "accepted calls that no worker has yet", registry=registry)
        self._request_s = self._histogram("request_seconds", "body whole to response written", _SECONDS)
        self._queue_s = self._histogram("queue_seconds", "plan ready to first pass", _SECONDS)
        self._prepare_s = self._histogram("prepare_seconds", "preprocessing", _SECONDS, ["kind"])
        self._pass_tokens = self._histogram("pass_tokens", "real tokens of a pass", _TOKENS)
        self._pass_occupancy = self._histogram("pass_occupancy", "real / padded tokens of a pass", _SHARES)
        self._gpu_s = Counter("spinf_gpu_seconds_total", "time in passes, on the CPU too", registry=registry)
        self._tokens = Counter("spinf_tokens_total", "tokens by kind", ["kind"], registry=registry)
        self._gpu_memory = Gauge("spinf_gpu_memory_bytes", "device memory that the engine holds", registry=registry)
        self._gpu_memory_part = Gauge("spinf_gpu_memory_part_bytes", "parts of it", ["part"], registry=registry)
        self._late_compiles = Counter("spinf_late_compiles_total", "kernels compiled while serving", registry=registry)
        self._restarts = Counter("spinf_engine_restarts_total", "engines that died", registry=registry)
        self._lost = Counter("spinf_workers_lost_total", "preprocess workers that died", registry=registry)
        self._dropped = Counter("spinf_results_dropped_total", "results without a caller", registry=registry)
        self._info = Gauge(
            "spinf_info", "what is served", ["version", "model", "scheme", "fingerprint"], registry=registry
        )
        self._engine = ""
        self._totals: dict[str, float] = {}
        self._start_at_zero()

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], labels: list[str] | None = None
    ) -> Histogram:
        return Histogram(f"spinf_{name}", text, labels or [], buckets=buckets, registry=self.registry)

    def _start_at_zero(self) -> None:
        for route in (*ROUTES.values(), PACK, OTHER):
            self._requests.labels(route.name, "404" if route is OTHER else "200")
        for code in STATUS_OF_CODE:
            self._rejected.labels(code)
        for kind in _COUNTED:
            self._tokens.labels(kind)
        for part in _MEMORY_PARTS:
            self._gpu_memory_part.labels(part)
        self._prepare_s.labels("text")
        self._info.labels(__version__, self._model, "", "").set(1)

    def ended(self, call: Call, now: float) -> None:
        """A call is over, whatever became of it."""
        self._requests.labels(call.route.name, str(call.status)).inc()
        if call.code is not None:
            self._rejected.labels(call.code).inc()
        if call.route.name in SCORING and call.received is not None and call.status != CLIENT_GONE:
            self._request_s.observe(now - call.received)
        self._scored(call.facts)

    def _scored(self, facts: dict[str, Any]) -> None:
        if "prepare_ms" in facts:
            self._prepare_s.labels("text").observe(facts["prepare_ms"] / 1000)
        if "queue_ms" in facts:
            self._queue_s.observe(facts["queue_ms"] / 1000)
        for kind in _COUNTED:
            self._tokens.labels(kind).inc(facts.get(f"{kind}_tokens", 0))

    def _raise_to(self, counter: Counter, key: str, total: float) -> None:
        """Bring a counter to a total that somebody else counts."""
        counter.inc(max(0.0, total - self._totals.get(key, 0.0)))
        self._totals[key] = total

    def serving(self, serving: Serving) -> None:
        """The supervisor's counters and what is served. A dead engine holds no memory any more."""
        if serving.engine_restarts > self._totals.get("restarts", 0):
            self._set_memory({})
        self._raise_to(self._restarts, "restarts", serving.engine_restarts)
        self._raise_to(self._lost, "lost", serving.workers_lost)
        if serving.info is not None:
            self._info.clear()
            self._info.labels(__version__, self._model, serving.info.scheme, serving.info.fingerprint).set(1)

    def engine(self, stats: EngineStats) -> None:
        """The engine's counters since its start: what they grew by is added, so a new engine starts again at zero."""
        if stats.sender != self._engine:
            self._engine = stats.sender
            self._totals.pop("busy_s", None)
            self._totals.pop("late_compiles", None)
        self._raise_to(self._gpu_s, "busy_s", float(stats.numbers.get("busy_s", 0.0)))
        self._set_memory(stats.numbers)
        self._raise_to(self._late_compiles, "late_compiles", float(stats.numbers.get("late_compiles", 0)))
        for tokens in stats.pass_tokens:
            self._pass_tokens.observe(float(tokens))
        for share in stats.pass_occupancy:
            self._pass_occupancy.observe(float(share))

    def _set_memory(self, numbers: dict[str, Any]) -> None:
        self._gpu_memory.set(numbers.get("memory_bytes", 0))
        for part, number in _MEMORY_PARTS.items():
            self._gpu_memory_part.labels(part).set(numbers.get(number, 0))

    def render(self, *, running: int, waiting: int, dropped: int) -> bytes:
        """The text of /metrics."""
        self._running.set(running)
        self._waiting.set(waiting)
        self._raise_to(self._dropped, "dropped", dropped)
        return generate_latest(self.registry)
