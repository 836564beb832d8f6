"""What the speed scripts measure with: timed calls, how busy the GPU was, and what the machine is."""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from workers.engine.fingerprint import cpu_name

_COPIES = ("Memcpy", "Memset")
_HEAD_START = 60_000_000  # clock cycles: some 30 ms


@dataclass
class Phases:
    """Wall and processor seconds of named functions, wherever they are called. Safe to share between threads."""

    calls: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))

    def probe(self, owner: Any, attribute: str, name: str) -> None:
        """Time every call of `owner.attribute` from now on; an owner that lacks it is left alone."""
        function = getattr(owner, attribute, None)
        if function is not None:
            setattr(owner, attribute, self.timed(function, name))

    def timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """The function, timed."""

        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter(), time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.calls[name].append((time.perf_counter() - started[0], time.thread_time() - started[1]))

        return call

    def clear(self) -> None:
        """Forget what was measured."""
        self.calls.clear()

    def lines(self, contents: int) -> Iterable[str]:
        """A table: per phase calls, milliseconds of a call, processor milliseconds per content."""
        yield f"{'host phase':12} {'calls':>6} {'wall ms/call':>13} {'cpu ms/call':>12} {'cpu ms/content':>15}"
        for name, times in self.calls.items():
            wall, cpu = np.array(times).sum(axis=0) * 1e3
            yield f"{name:12} {len(times):6d} {wall / len(times):13.2f} {cpu / len(times):12.2f} {cpu / contents:15.3f}"


@dataclass(frozen=True, slots=True)
class GpuTrace:
    """wall, busy: seconds; busy is the time in which at least one kernel ran. kernels: name → (calls, seconds)."""

    wall: float
    busy: float
    kernels: dict[str, tuple[int, float]]

    def top(self, count: int) -> Iterable[str]:
        """A table of the kernels that took longest."""
        total = sum(seconds for _, seconds in self.kernels.values())
        ranked = sorted(self.kernels.items(), key=lambda item: -item[1][1])
        for name, (calls, seconds) in ranked[:count]:
            yield f"{seconds * 1e3:9.2f} ms {seconds / total:6.1%} {calls:6d} x  {name[:84]}"
        rest = ranked[count:]
        if rest:
            yield f"{sum(s for _, (_, s) in rest) * 1e3:9.2f} ms in {len(rest)} other kernels"


def trace_gpu(run: Callable[[], object]) -> GpuTrace:
    """Run once under the profiler, which sees the kernels of every thread."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        wall = time.perf_counter() - started
    spans, kernels = [], defaultdict[str, list[float]](list)
    for event in profiler.events() or ():
        if event.device_type != torch.autograd.DeviceType.CUDA or event.name.startswith(_COPIES):
            continue
        spans.append((event.time_range.start, event.time_range.end))
        kernels[event.name].append((event.time_range.end - event.time_range.start) / 1e6)
    return GpuTrace(wall, covered(spans) / 1e6, {name: (len(t), sum(t)) for name, t in kernels.items()})


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def event_seconds(run: Callable[[], object], repeats: int = 10, warm: int = 3) -> float:
    """Median seconds of a call on the GPU, by events around each; the L2 cache is swept before every one.

    The GPU first waits, so that the host has queued all calls before the first one runs: its own time is not measured.
    """
    sweep = torch.empty(128 << 20, dtype=torch.int8, device="cuda")
    for _ in range(warm):
        run()
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    torch.cuda.synchronize()
    torch.cuda._sleep(_HEAD_START)
    for before, after in pairs:
        sweep.zero_()
        before.record()
        run()
        after.record()
    torch.cuda.synchronize()
    return float(np.median([before.elapsed_time(after) for before, after in pairs])) / 1e3


def percentile(values: Iterable[float], share: float) -> float:
    """The value below which `share` of them lie."""
    return float(np.percentile(list(values), 100 * share))


def machine() -> str:
    """One line: what ran this."""
    where = f"{cpu_name()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    versions = f"torch {torch.__version__}"
    if not torch.cuda.is_available():
        return f"{where}; {versions}"
    facts = torch.cuda.get_device_properties(0)
    return f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB; {where}; {versions}, CUDA {torch.version.cuda}"
