"""Streams of every length, twice: nothing is compiled once the engine is ready, the second run takes as long.

    python -m benchmarks.stream_lengths --model DIR [--quant auto] [--device cuda:0] [--token-budget 16384]
        [--max-tokens 65536] [--tolerance 0.05]

One content of random ids under a number of questions, as a request by itself; the list in `SHAPES` goes from one token
to 65,000 and from one question to 5,000. Fails (exit 1) when a kernel was compiled after the warm-up, when torch's own
compiler was used, when the two runs differ in a bit, or when their times differ by more than the tolerance in total.
"""

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import workers.engine  # noqa: F401 - before torch
from benchmarks.engines import load_engine, score_plans
from benchmarks.probes import machine
from spinf_serve.plan import F32, ScorePlan
from workers.engine.engine import ScoringEngine
from workers.engine.warmup import warmup_plan

BRANCH = {1: 12, 56: 12, 700: 12, 5000: 3}
"""Questions → tokens of each."""

SHAPES: dict[int, tuple[int, ...]] = {
    1: (1, 56, 700, 5000), 2: (1, 56), 15: (1, 56), 16: (1, 56), 17: (1, 56, 5000), 63: (1, 56, 700), 500: (1, 56, 700),
    1023: (1, 56), 1024: (1, 56, 5000), 1025: (1, 56), 4000: (1, 56, 700), 16_383: (1,), 16_384: (1, 56),
    16_385: (1, 56), 40_000: (1, 700), 65_000: (56,),
}  # fmt: skip
"""Tokens of the content → numbers of questions."""


@dataclass(frozen=True, slots=True)
class Stream:
    """One request."""

    content: int
    questions: int
    plan: ScorePlan


def make_streams(vocab_size: int, max_tokens: int) -> list[Stream]:
    """The list, without what `max_tokens` does not hold; random ids, two options a question."""
    rng = np.random.default_rng(0)
    found = []
    for content, numbers in SHAPES.items():
        for questions in numbers:
            branch = BRANCH[questions]
            if content + branch > max_tokens:
                continue
            plan = warmup_plan([content], questions, branch)
            reads = len(plan.read_rows)
            plan = ScorePlan(
                tokens=rng.integers(0, vocab_size, len(plan.tokens)).astype(np.int32),
                parents=plan.parents,
                job_offsets=plan.job_offsets,
                prefix_lens=plan.prefix_lens,
                read_rows=plan.read_rows,
                col_offsets=np.arange(reads + 1, dtype=np.int64) * 2,
                cols=rng.integers(0, vocab_size, 2 * reads).astype(np.int32),
            )
            found.append(Stream(content, questions, plan))
    return found


def run(engine: ScoringEngine, streams: list[Stream]) -> tuple[list[float], list[F32]]:
    """Seconds and values of each, one after the other."""
    seconds, values = [], []
    for stream in streams:
        started = time.perf_counter()
        result = score_plans(engine, {"stream": stream.plan})["stream"]
        seconds.append(time.perf_counter() - started)
        values.append(result.logprobs)
    return seconds, values


def compilers() -> list[str]:
    """torch's own compilers, where they are loaded."""
    return [name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules]


def faults(engine: ScoringEngine, seconds: list[list[float]], values: list[list[F32]], tolerance: float) -> list[str]:
    """What is not as it has to be."""
    found = []
    late = engine.stats().get("late_compiles", 0)
    if late:
        found.append(f"{late} kernels were compiled after the warm-up")
    if loaded := compilers():
        found.append(f"{', '.join(loaded)} was imported")
    different = sum(not np.array_equal(a, b) for a, b in zip(*values, strict=True))
    if different:
        found.append(f"{different} streams gave other bits the second time")
    if not all(np.isfinite(a).all() for a in values[0]):
        found.append("a value is not finite")
    first, second = (sum(some) for some in seconds)
    if abs(second / first - 1) > tolerance:
        found.append(f"the second run took {second / first - 1:+.1%} of the first, more than {tolerance:.0%}")
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="snapshot directory")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quant", default="auto")
    parser.add_argument("--token-budget", type=int, default=16_384)
    parser.add_argument("--max-tokens", type=int, default=65_536)
    parser.add_argument("--max-stream", type=int, default=None, help="leave out contents over this many tokens")
    parser.add_argument("--tolerance", type=float, default=0.05, help="share by which the two runs may differ in time")
    return parser.parse_args()


def main() -> None:
    """Load, warm up, run twice, print, judge."""
    args = arguments()
    sizes = {"token_budget": args.token_budget, "max_tokens": args.max_tokens}
    engine = load_engine(args.model, device=args.device, quant=args.quant, warmup="full", **sizes)
    engine.warm_up()
    info = engine.info
    print(machine())
    print(
        f"{args.model}, {info.scheme}; ready after {info.load_s + info.warmup_s:.1f} s (load {info.load_s:.1f}, "
        f"warm-up {info.warmup_s:.1f}); {info.compiles} kernels compiled; "
        f"compilers of torch imported: {', '.join(compilers()) or 'none'}",
        flush=True,
    )
    streams = make_streams(info.vocab_size, args.max_tokens)
    streams = [s for s in streams if args.max_stream is None or s.content <= args.max_stream]
    seconds, values = zip(*(run(engine, streams) for _ in range(2)), strict=True)
    print(f"{'content':>8} {'questions':>9} {'tokens':>7} {'first ms':>9} {'second ms':>9}")
    for stream, first, second in zip(streams, *seconds, strict=True):
        tokens = len(stream.plan.tokens)
        print(f"{stream.content:8d} {stream.questions:9d} {tokens:7d} {first * 1e3:9.1f} {second * 1e3:9.1f}")
    total = sum(len(stream.plan.tokens) for stream in streams)
    first, second = (sum(some) for some in seconds)
    print(f"{'all':>8} {'':9} {total:7d} {first * 1e3:9.1f} {second * 1e3:9.1f}  {second / first - 1:+.2%}")
    found = faults(engine, list(seconds), list(values), args.tolerance)
    engine.close()
    print("\n".join(f"FAILED: {fault}" for fault in found) or "nothing compiled, equal bits, equal time")
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
