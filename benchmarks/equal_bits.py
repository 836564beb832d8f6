"""A job set's scores in every company, bit for bit: alone, packed, reversed, beside others, in parts, cut into passes.

    python -m benchmarks.equal_bits --model DIR [--jobs FILE] [--quant auto] [--articles 6] [--budgets 16384 1024]
        [--processes 2] [--digest-only]

A value is log P of a token after a path, and known by the two: whatever request asks for it, in whatever order and
pass, its bits must be those that its article alone gave. Each line is one comparison: requests, passes, passes with
several requests, passes that read stored contents, values compared, values that differ.

--processes N   in N fresh processes at the same time: the first compares, all must print the same digest of the values
--digest-only   score the articles together, print the digest and nothing else

A scheme that is not batch-invariant must say so, never share a pass, and give the same bits to the same request.
Exit 1 for any difference.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

import workers.engine  # noqa: F401 - before torch
from benchmarks.engines import load_engine, score_plans
from benchmarks.job_speed import DEFAULT_JOBS
from benchmarks.jobs import Json, copies_of, read_jobs, score_body
from benchmarks.probes import machine
from spinf_serve import snapshots
from spinf_serve.plan import F32, ScorePlan
from spinf_serve.settings import Settings
from workers.engine.engine import ScoringEngine
from workers.engine.packing import PackedPass
from workers.preprocess.preprocessor import SCORE, Preprocessor, RequestHeader
from workers.preprocess.tokenizer import ContentTokenizer

DIGEST = "digest "
FEW = 7  # questions where not all are asked

Values = dict[tuple[bytes, int], int]
"""(digest of a path's tokens, token that is scored) → the bits of its log-probability."""


def values_of(plan: ScorePlan, logprobs: F32) -> Values:
    """Every value of a plan by what it means."""
    digests: list[bytes] = []
    for token, parent in zip(plan.tokens.tolist(), plan.parents.tolist(), strict=True):
        above = digests[parent] if parent >= 0 else b""
        digests.append(hashlib.blake2b(above + token.to_bytes(4, "little"), digest_size=16).digest())
    bits, columns, found = logprobs.view(np.uint32).tolist(), plan.cols.tolist(), Values()
    for number, row in enumerate(plan.read_rows.tolist()):
        for entry in range(int(plan.col_offsets[number]), int(plan.col_offsets[number + 1])):
            key = digests[row], columns[entry]
            if found.setdefault(key, bits[entry]) != bits[entry]:
                raise SystemExit("FAILED: one request holds the same path twice, with different bits")
    return found


def digest(values: Values) -> str:
    """One line for all values."""
    total = hashlib.sha256()
    for (path, token), bits in sorted(values.items()):
        total.update(path + token.to_bytes(4, "little") + bits.to_bytes(4, "little"))
    return total.hexdigest()


class Requests:
    """Jobs as plans, the way a server makes them. floors: with those of the empty content, which requests share."""

    def __init__(self, snapshot: Path) -> None:
        self.floors = True
        settings = Settings.load({"model": str(snapshot), "device": "cpu", "max_processed_tokens": 10_000_000})
        config = settings.preprocess_config(snapshots.describe(settings.choice()))
        self._preprocessor = Preprocessor(config, ContentTokenizer.load(snapshot))

    def plan(self, jobs: Sequence[Json], change: Callable[[Json], Json] = lambda body: body) -> ScorePlan:
        """One request of these jobs; `change` changes its body."""
        body = json.dumps(change(score_body(jobs, empty_floor=self.floors))).encode()
        return self._preprocessor.prepare(body, RequestHeader("bits", SCORE, True, None, time.monotonic())).plan


def regrouped(groups: int) -> Callable[[Json], Json]:
    """The queries dealt out to groups, each laid out in a tree of its own."""

    def change(body: Json) -> Json:
        for number, query in enumerate(body["scoring"]["queries"]):
            query["group"] = f"g{number % groups}"
        return body

    return change


def asked(jobs: Sequence[Json], cells: Callable[[list[Json]], list[Json]]) -> list[Json]:
    """The jobs with other cells."""
    return [job | {"cells": cells(job["cells"])} for job in jobs]


@dataclass
class Seen:
    """What the passes of a comparison were like."""

    passes: int = 0
    shared: int = 0
    stored: int = 0

    def count(self, packed: PackedPass) -> None:
        self.passes += 1
        self.shared += len({share.key for share in packed.shares}) > 1
        self.stored += bool(packed.stores)


def anything(_seen: Seen) -> bool:
    """No demand."""
    return True


def has_shared(seen: Seen) -> bool:
    """Some pass held several requests."""
    return seen.shared > 0


def has_none_shared(seen: Seen) -> bool:
    """None did."""
    return not seen.shared


def has_stored(seen: Seen) -> bool:
    """Some pass read the content of an earlier one."""
    return seen.stored > 0


@contextmanager
def watched(engine: ScoringEngine) -> Iterator[Seen]:
    """Count the passes that the engine stages while this lasts."""
    seen, plain = Seen(), engine._runner.stage

    def stage(packed: PackedPass) -> Any:
        seen.count(packed)
        return plain(packed)

    engine._runner.stage = stage  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        engine._runner.stage = plain  # type: ignore[method-assign]


def at_budget(engine: ScoringEngine, budget: int) -> ScoringEngine:
    """A second engine on the same weights whose passes are of another size. Close neither it nor what it runs on."""
    config = replace(engine.config, token_budget=budget)
    return ScoringEngine(config, engine._runner, engine.info, memory=engine._memory)


@dataclass
class Comparison:
    """Compares runs with the values of the articles alone, and prints a line for each."""

    expected: Values = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    HEADER: ClassVar[str] = f"{'':44} {'req':>4} {'pass':>5} {'shared':>6} {'stored':>6} {'values':>7} {'differ':>6}"

    def run(
        self,
        name: str,
        engine: ScoringEngine,
        plans: Mapping[Hashable, ScorePlan],
        *,
        must: Callable[[Seen], bool] = anything,
        company: Mapping[Hashable, ScorePlan] | None = None,
    ) -> Values:
        """Score all at once. must: what the passes have to be like. company: requests whose own values do not count."""
        with watched(engine) as seen:
            results = score_plans(engine, {**(company or {}), **plans})
        found: Values = {}
        for key, plan in plans.items():
            found |= values_of(plan, results[key].logprobs)
        common = found.keys() & self.expected.keys()
        differ = sum(found[key] != self.expected[key] for key in common)
        requests = len(plans) + len(company or {})
        print(
            f"{name:44} {requests:4d} {seen.passes:5d} {seen.shared:6d} {seen.stored:6d} {len(common):7d} {differ:6d}",
            flush=True,
        )
        if differ or not common or len(common) < len(found):
            self.faults.append(f"{name}: of {len(found)} values {len(common)} are known, {differ} differ")
        if not must(seen):
            self.faults.append(f"{name}: the passes were not what this comparison is about")
        return found


def one_by_one(jobs: Sequence[Json], requests: Requests) -> dict[Hashable, ScorePlan]:
    """A request for each article."""
    return {job["id"]: requests.plan([job]) for job in jobs}


def read_alone(engine: ScoringEngine, plans: Mapping[Hashable, ScorePlan]) -> Values:
    """Each request while no other is there."""
    found: Values = {}
    for key, plan in plans.items():
        values = values_of(plan, score_plans(engine, {key: plan})[key].logprobs)
        if any(found.get(at, bits) != bits for at, bits in values.items()):
            raise SystemExit("FAILED: a path that two requests share has different bits")
        found |= values
    return found


def compare(
    engine: ScoringEngine, requests: Requests, jobs: list[Json], others: list[Json], budgets: list[int]
) -> list[str]:
    """All comparisons of a batch-invariant scheme; returns what failed."""
    alone, together = one_by_one(jobs, requests), requests.plan(jobs)
    company: dict[Hashable, ScorePlan] = {f"other {i}": requests.plan([job]) for i, job in enumerate(others)}
    backwards = requests.plan(asked(jobs, lambda cells: cells[::-1])[::-1])
    few = requests.plan(asked(jobs, lambda cells: cells[::FEW]))
    single = one_by_one(asked(jobs, lambda cells: cells[:1]), requests)
    grouped = {count: requests.plan(jobs, regrouped(count)) for count in (2, 5)}
    comparison = Comparison(read_alone(engine, alone))
    print(Comparison.HEADER)
    for budget in budgets:
        run = partial(comparison.run, engine=at_budget(engine, budget))
        cut = has_stored if len(together.tokens) > budget else anything
        mixed = has_shared if budget >= 2 * max(len(plan.tokens) for plan in alone.values()) else anything
        at = f"{budget}: "
        run(at + "one request of all articles", plans={"all": together}, must=cut)
        run(at + "articles and questions reversed", plans={"all": backwards}, must=cut)
        run(at + "a request an article, all at once", plans=alone, must=mixed)
        run(at + "the same, reversed", plans=dict(reversed(alone.items())), must=mixed)
        run(at + "beside other requests", plans=alone, company=company, must=mixed)
        run(at + f"every {FEW}th question", plans={"all": few})
        run(at + "the first question alone, all at once", plans=single, must=mixed)
        for count, plan in grouped.items():
            run(at + f"questions in {count} groups", plans={"all": plan}, must=cut)
    return comparison.faults


def compare_unshared(engine: ScoringEngine, requests: Requests, jobs: list[Json]) -> list[str]:
    """A scheme whose scores depend on company: no pass may hold two requests, the same request has the same bits."""
    alone = one_by_one(jobs, requests)
    comparison = Comparison(read_alone(engine, alone))
    print(Comparison.HEADER)
    comparison.run("a request an article, all at once", engine, alone, must=has_none_shared)
    comparison.run("the same, reversed", engine, dict(reversed(alone.items())), must=has_none_shared)
    return comparison.faults


def in_processes(args: argparse.Namespace) -> int:
    """Run this module in several processes at the same time; the exit status."""
    command = [sys.executable, "-m", "benchmarks.equal_bits"]
    for name in ("model", "jobs", "articles", "device", "quant"):
        command += [f"--{name}", str(getattr(args, name))]
    command += ["--budgets", *map(str, args.budgets)]
    started = [
        subprocess.Popen(command + ["--digest-only"] * (number > 0), stdout=subprocess.PIPE, text=True)
        for number in range(args.processes)
    ]
    digests, failed = [], False
    for number, process in enumerate(started, start=1):
        out = process.communicate()[0]
        print(f"process {number}:\n{out}", end="", flush=True)
        failed |= process.returncode != 0
        digests += [line.split()[1] for line in out.splitlines() if line.startswith(DIGEST)]
    equal = len(digests) == args.processes and len(set(digests)) == 1
    print(f"{args.processes} fresh processes: {'the same bits' if equal else 'FAILED: NOT THE SAME BITS'}")
    return int(failed or not equal)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="snapshot directory with a tokenizer")
    parser.add_argument("--jobs", type=Path, default=DEFAULT_JOBS, help="job set, JSON or JSON.gz")
    parser.add_argument("--articles", type=int, default=6)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quant", default="auto")
    parser.add_argument("--budgets", type=int, nargs="+", default=[16_384, 1024], help="tokens of a pass")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--digest-only", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Load, compare, print; exit 1 for any difference."""
    args = arguments()
    if args.processes > 1:
        raise SystemExit(in_processes(args))
    started = time.perf_counter()
    every = read_jobs(args.jobs)
    jobs, requests = every[: args.articles], Requests(args.model)
    others = copies_of(every[args.articles :] or every, 1)[: args.articles]
    settings = {"device": args.device, "quant": args.quant, "warmup": "none", "token_budget": args.budgets[0]}
    engine = load_engine(args.model, **settings)
    info, faults = engine.info, list[str]()
    requests.floors = info.batch_invariant
    if not args.digest_only:
        print(f"{machine()}\n{args.model}, {info.scheme}, batch_invariant {info.batch_invariant}; {len(jobs)} articles")
        if info.batch_invariant != (info.scheme != "fp8"):
            faults.append(f"{info.scheme} says batch_invariant {info.batch_invariant}")
        if info.batch_invariant:
            faults += compare(engine, requests, jobs, others, args.budgets)
        else:
            faults += compare_unshared(engine, requests, jobs)
        print("\n".join(f"FAILED: {fault}" for fault in faults) or "equal bits in every comparison")
    values = read_alone(engine, one_by_one(jobs, requests))
    print(f"{DIGEST}{digest(values)} of {len(values)} values; {time.perf_counter() - started:.1f} s")
    engine.close()
    raise SystemExit(bool(faults))


if __name__ == "__main__":
    main()
