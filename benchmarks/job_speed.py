"""The standard job set in process, warm: questions and real tokens per second, and who the bottleneck is.

    python -m benchmarks.job_speed --model DIR [--jobs FILE] [--device cuda:0] [--quant fp8s] [--copies 8]
        [--in-flight 8] [--inputs 8] [--no-floors] [--repeats 3]

Three uses of the same articles, each a number of requests sent by `--in-flight` threads through `Engine.score_bytes`:
the whole set as one request; `--copies` of the set as requests of `--inputs` articles; the same as one request a copy.
Every article of the copies has a numbered headline of its own, so no two contents begin alike.

Wall time is from the first body's bytes to the last response's: parsing, tokenizing and writing JSON are included, the
warm-up is not. Questions are the articles' own; floors (`--no-floors` leaves them out) cost tokens but are not counted.
Tokens are real ones, as the plans hold them: no padding, nothing run twice. Nothing is printed unless every repeat gave
the same results, and on a batch-invariant scheme each article the same alone as in company.
"""

import argparse
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import workers.engine  # noqa: F401 - before torch
import workers.engine.engine as engine_module
from benchmarks.jobs import Json, copies_of, num_questions, read_jobs, score_body
from benchmarks.probes import GpuTrace, Phases, machine, percentile, trace_gpu
from spinf_serve import Engine

DEFAULT_JOBS = Path(__file__).parent / "jobs" / "town_news.json"


@dataclass(frozen=True, slots=True)
class Use:
    """A way to ask: bodies, sent by `in_flight` threads."""

    name: str
    bodies: list[bytes]
    questions: int
    contents: int
    in_flight: int


@dataclass(frozen=True, slots=True)
class Measured:
    """walls: seconds of each repeat. passes, tokens, padded, busy_s: of the last one, by the engine's own counters."""

    walls: list[float]
    tokens: int
    passes: int
    packed: int
    padded: int
    busy_s: float
    results: dict[str, Any]


def use_of(name: str, jobs: Sequence[Json], inputs: int, in_flight: int, *, floors: bool) -> Use:
    """The jobs in requests of `inputs` articles."""
    groups = [jobs[i : i + inputs] for i in range(0, len(jobs), inputs)]
    bodies = [json.dumps(score_body(group, empty_floor=floors)).encode() for group in groups]
    return Use(name, bodies, num_questions(jobs), len(jobs), min(in_flight, len(bodies)))


class Bench:
    """One loaded engine with its probes."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.phases, self.plan_tokens = engine, Phases(), 0
        preprocessor, scoring = engine._preprocessor, engine._engine
        prepare = preprocessor.prepare

        def counted(*args: Any) -> Any:
            prepared = prepare(*args)
            self.plan_tokens += len(prepared.plan.tokens)
            return prepared

        preprocessor.prepare = counted  # type: ignore[method-assign]
        runner = scoring._runner
        for owner, attribute, name in (
            (preprocessor, "prepare", "prepare"),
            (preprocessor, "assemble", "assemble"),
            (scoring._scheduler, "next_pass", "schedule"),
            (engine_module, "build_pass", "pack"),
            (runner, "stage", "stage"),
            (engine_module, "launch", "launch"),
            (runner, "run", "run"),
            (scoring, "_hand_out", "hand out"),
        ):
            self.phases.probe(owner, attribute, name)

    def stats(self) -> dict[str, Any]:
        return self.engine._engine.stats()

    def send(self, use: Use) -> list[bytes]:
        """All responses of a use, in order."""
        with ThreadPoolExecutor(use.in_flight) as pool:
            return list(pool.map(self.engine.score_bytes, use.bodies))

    def measure(self, use: Use, repeats: int) -> Measured:
        """Time a use. SystemExit when two repeats differ."""
        results = results_of(self.send(use))  # warm
        walls: list[float] = []
        for _ in range(repeats):
            self.phases.clear()
            self.plan_tokens, before = 0, self.stats()
            started = time.perf_counter()
            responses = self.send(use)
            walls.append(time.perf_counter() - started)
            after = self.stats()
            if results_of(responses) != results:
                raise SystemExit(f"NOT PRINTED: two runs of {use.name} gave different results")
        passes, packed, padded, busy = (
            after[key] - before[key] for key in ("passes", "packed_tokens", "padded_tokens", "busy_s")
        )
        return Measured(walls, self.plan_tokens, passes, packed, padded, busy, results)

    def latencies(self, jobs: Sequence[Json], repeats: int, *, floors: bool) -> tuple[list[float], dict[str, Any]]:
        """Seconds of single requests of one article, one after the other; and their results."""
        bodies = [json.dumps(score_body([job], empty_floor=floors)).encode() for job in jobs]
        walls, results = [], {}
        self.engine.score_bytes(bodies[0])
        for _ in range(repeats):
            for body in bodies:
                started = time.perf_counter()
                response = self.engine.score_bytes(body)
                walls.append(time.perf_counter() - started)
                results |= results_of([response])
        return walls, results


def results_of(responses: Sequence[bytes]) -> dict[str, Any]:
    """Input id → its answers."""
    return {result["input_id"]: result for response in responses for result in json.loads(response)["results"]}


def report(use: Use, run: Measured, trace: GpuTrace | None) -> str:
    """One line of the table. The gap is the part of the wall in which no kernel ran; without a GPU, no pass."""
    wall = percentile(run.walls, 0.5)
    gap = 1 - trace.busy / trace.wall if trace else 1 - min(1.0, run.busy_s / run.walls[-1])
    busy = f"{run.tokens / trace.busy:9.0f}" if trace else f"{run.tokens / run.busy_s:9.0f}"
    return (
        f"{use.name:26} {len(use.bodies):4d} {use.in_flight:4d} {use.questions:6d} {run.tokens:8d} {run.passes:4d} "
        f"{wall:8.3f} {min(run.walls):8.3f} {use.questions / wall:9.1f} {run.tokens / wall:9.0f} {busy} {gap:6.1%} "
        f"{run.packed / run.padded:6.1%}"
    )


HEADER = (
    f"{'use':26} {'req':>4} {'fly':>4} {'quest':>6} {'tokens':>8} {'pass':>4} {'median s':>8} {'best s':>8} "
    f"{'quest/s':>9} {'tok/s':>9} {'busy tok/s':>9} {'gap':>5} {'occup':>6}"
)


def check_alone(alone: dict[str, Any], together: dict[str, Any]) -> None:
    """SystemExit unless each article has the same numbers alone as in company."""
    for name, result in alone.items():
        if result != together[name]:
            raise SystemExit(f"NOT PRINTED: {name} has other scores alone than in company")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="snapshot directory or name")
    parser.add_argument("--jobs", type=Path, default=DEFAULT_JOBS, help="job set, JSON or JSON.gz")
    parser.add_argument("--articles", type=int, default=None, help="jobs of the set to use (default: all)")
    parser.add_argument("--copies", type=int, default=8)
    parser.add_argument("--inputs", type=int, default=8, help="articles of a request, where copies are sent")
    parser.add_argument("--in-flight", type=int, default=8, help="requests at a time, each from a thread of its own")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quant", default="auto")
    parser.add_argument("--token-budget", type=int, default=None)
    parser.add_argument("--warmup", choices=("full", "short", "none"), default="full")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-floors", action="store_true", help="ask without the floors of the empty content")
    parser.add_argument("--kernels", type=int, default=0, help="print this many kernels of the copies' run")
    return parser.parse_args()


def main() -> None:
    """Run and print."""
    args = arguments()
    floors = not args.no_floors
    jobs = read_jobs(args.jobs)[: args.articles]
    many = copies_of(jobs, args.copies)
    settings = {"device": args.device, "quant": args.quant, "warmup": args.warmup, "max_processed_tokens": 10_000_000}
    if args.token_budget:
        settings["token_budget"] = args.token_budget
    on_gpu = args.device.startswith("cuda")
    started = time.perf_counter()
    with Engine(args.model, on_progress=lambda _line: None, **settings) as engine:
        ready, info, bench = time.perf_counter() - started, engine.info, Bench(engine)
        print(machine())
        print(
            f"{args.model}, {info.scheme}, batch-invariant {info.batch_invariant}, fingerprint {info.fingerprint}; "
            f"{args.jobs.name}, {len(jobs)} articles, floors {'on, not counted as questions' if floors else 'off'}"
        )
        print(
            f"ready after {ready:.1f} s (load {info.load_s:.1f}, warm-up {info.warmup_s:.1f}); passes of up to "
            f"{info.token_budget} tokens; {args.repeats} repeats",
            flush=True,
        )
        uses = [
            use_of(f"set, {len(jobs)} x {len(jobs[0]['cells'])}", jobs, len(jobs), 1, floors=floors),
            use_of(f"x{args.copies}, {args.inputs} a request", many, args.inputs, args.in_flight, floors=floors),
            use_of(f"x{args.copies}, {len(jobs)} a request", many, len(jobs), args.in_flight, floors=floors),
        ]
        # First of all: a profiler, once attached, makes every launch after it slower.
        walls, alone = bench.latencies(jobs, max(1, args.repeats), floors=floors)
        plain, _ = bench.latencies(jobs, max(1, args.repeats), floors=False)
        lines, phases, traces = [], {}, {}
        together: dict[str, Any] = {}
        for use in uses:
            run = bench.measure(use, args.repeats)
            phases[use.name] = list(bench.phases.lines(use.contents))
            trace = traces[use.name] = trace_gpu(lambda use=use: bench.send(use)) if on_gpu else None
            lines.append(report(use, run, trace))
            together |= run.results
        if info.batch_invariant:
            check_alone(alone, together)
        print(HEADER)
        print("\n".join(lines))
        for name, some in (("floors on" if floors else "floors off", walls), ("floors off", plain)):
            p50, p95 = (percentile(some, share) * 1e3 for share in (0.5, 0.95))
            print(
                f"one request, 1 content x {len(jobs[0]['cells'])} questions, {name}: p50 {p50:.1f} ms, "
                f"p95 {p95:.1f} ms ({len(some)} requests, one at a time)"
            )
        if on_gpu:
            allocated, reserved = (
                f() / 2**30 for f in (torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved)
            )
            print(f"peak memory {allocated:.2f} GiB allocated, {reserved:.2f} GiB reserved")
        print(f"the host's work in the last repeat of '{uses[1].name}':")
        print("\n".join(phases[uses[1].name]))
        if args.kernels and (trace := traces[uses[1].name]):
            print("\n".join(trace.top(args.kernels)))


if __name__ == "__main__":
    main()
