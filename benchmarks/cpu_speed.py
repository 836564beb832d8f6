"""Questions per second on the CPU, beside transformers and beside the bare matrix products, all in one run.

    python -m benchmarks.cpu_speed [--jobs FILE] [--articles 4] [--model demo] [--quant bf16] [--subset 28]

Prints a figure only after our log-probabilities agreed with transformers' on the questions that both ran: in f32 to
1e-4, in bf16 when they are no further off transformers' float32 than transformers' own bf16.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import workers.engine  # noqa: F401 - before torch
from benchmarks.jobs import read_jobs, score_body
from benchmarks.products import product_seconds
from benchmarks.reference_speed import CachedReference, paths
from spinf_serve import snapshots
from spinf_serve.config import ServedModel
from spinf_serve.plan import ScorePlan
from spinf_serve.settings import Settings
from workers.engine.engine import ScoringEngine
from workers.engine.fingerprint import cpu_name
from workers.engine.models import model_config
from workers.preprocess.preprocessor import SCORE, Preprocessor, RequestHeader
from workers.preprocess.tokenizer import ContentTokenizer

BOUND = 1e-4
_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
DEFAULT_JOBS = Path(__file__).parent / "jobs" / "town_news.json"


def compile_plan(settings: Settings, model: ServedModel, body: bytes) -> ScorePlan:
    """The body's plan, as a preprocess worker makes it."""
    tokenizer = ContentTokenizer.load(Path(model.snapshot_dir))
    header = RequestHeader("benchmark", SCORE, True, None, time.monotonic())
    return Preprocessor(settings.preprocess_config(model), tokenizer).prepare(body, header).plan


def best_seconds(run: Callable[[], object], repeats: int) -> float:
    """The fastest of some repeats: other work on the machine only ever adds."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def run_plan(engine: ScoringEngine, plan: ScorePlan) -> np.ndarray:
    """The plan's log-probabilities."""
    engine.submit("benchmark", plan)
    while engine.has_work:
        for completion in engine.step():
            if completion.result is None:
                raise completion.error or RuntimeError("no result")
            return completion.result.logprobs
    raise RuntimeError("the engine lost the plan")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=Path, default=DEFAULT_JOBS, help="job set, JSON or JSON.gz")
    parser.add_argument("--articles", type=int, default=4, help="jobs of the set to use")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--quant", choices=_DTYPES, default="f32", help="scheme, ours and transformers'")
    parser.add_argument("--subset", type=int, default=56, help="questions per content that transformers runs")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-floors", action="store_true")
    return parser.parse_args()


def check(logprobs: np.ndarray, theirs: dict[int, float], exact: dict[int, float]) -> str:
    """What to say about our numbers beside transformers', and its float32 ones; SystemExit when they are not right."""
    ours = np.array([logprobs[i] - value for i, value in exact.items()])
    reference = np.array([theirs[i] - value for i, value in exact.items()])
    if theirs is exact:
        worst = float(np.abs(ours).max())
        if not worst <= BOUND:
            raise SystemExit(f"NOT PRINTED: log-probabilities differ from transformers by {worst:.2e} (bound {BOUND})")
        return f"largest difference {worst:.1e}"
    rms, limit = (float(np.sqrt(np.mean(d**2))) for d in (ours, reference))
    if not rms <= limit:
        raise SystemExit(f"NOT PRINTED: off float32 by {rms:.2e} (rms), transformers' own bf16 by {limit:.2e}")
    return f"off float32 by {rms:.1e} (rms), transformers by {limit:.1e}"


def main() -> None:
    """Run and print."""
    args = arguments()
    jobs = read_jobs(args.jobs)[: args.articles]
    body = json.dumps(score_body(jobs, empty_floor=not args.no_floors)).encode()
    limits = {"max_processed_tokens": 10_000_000}
    settings = Settings.load({"model": args.model, "device": "cpu", "quant": args.quant, **limits})
    model = snapshots.resolve(settings.choice(), print)
    plan = compile_plan(settings, model, body)
    engine = ScoringEngine.load(settings.engine_config(model))
    engine.warm_up()

    logprobs = run_plan(engine, plan)
    ours_s = best_seconds(lambda: run_plan(engine, plan), args.repeats)
    shapes = model_config(Path(model.snapshot_dir))
    dtype, reads = _DTYPES[args.quant], len(plan.read_rows)
    products_s = product_seconds(shapes, len(plan.tokens), reads, args.repeats, dtype)

    run = CachedReference(Path(model.snapshot_dir), dtype).run(paths(plan, args.subset))
    # Again after the reference: machines change their pace, and both sides should have seen the same.
    ours_s = min(ours_s, best_seconds(lambda: run_plan(engine, plan), args.repeats))
    engine.close()
    exact = run.values
    if dtype != torch.float32:
        few = paths(plan, max(1, args.subset // 7))
        exact = CachedReference(Path(model.snapshot_dir), torch.float32).run(few).values
        exact = {i: value for i, value in exact.items() if i in run.values}
    verdict = check(logprobs, run.values, exact)

    load = os.getloadavg()[0]
    print(f"{cpu_name()}, {os.cpu_count()} cores, load {load:.1f}; {args.model} {args.quant}; {args.jobs.name}")
    print(f"{reads} questions (floors included) on {len(jobs)} articles, {len(plan.tokens)} tokens; {verdict}")
    print(f"engine        {reads / ours_s:8.1f} questions/s  {len(plan.tokens) / ours_s:8.0f} tokens/s")
    print(
        f"transformers  {run.questions / run.seconds:8.1f} questions/s  on {run.questions} of them, contents included"
    )
    print(f"products      {reads / products_s:8.1f} questions/s  the bare linear and head products")
    ratio = reads / ours_s / (run.questions / run.seconds)
    print(f"engine = {ratio:.2f} x transformers, {products_s / ours_s:.2f} of the products")


if __name__ == "__main__":
    main()
