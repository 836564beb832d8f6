"""Full passes to time kernels on: the first one of a job set, and one of the same shape without a tokenizer."""

import json
import time
from pathlib import Path

import numpy as np

from benchmarks.jobs import copies_of, read_jobs, score_body
from spinf_serve import snapshots
from spinf_serve.plan import I64, ScorePlan
from spinf_serve.settings import Settings
from workers.engine.packing import PackedPass, build_pass
from workers.engine.scheduler import Scheduler
from workers.preprocess.preprocessor import SCORE, Preprocessor, RequestHeader
from workers.preprocess.tokenizer import ContentTokenizer

_CONTENT, _QUESTIONS, _QUESTION = 512, 56, 12


def job_plans(snapshot: Path, jobs: Path, copies: int, inputs: int) -> list[ScorePlan]:
    """The plans of requests of `inputs` articles, floors included, over copies of a job set."""
    limits = {"max_processed_tokens": 10_000_000}
    settings = Settings.load({"model": str(snapshot), "device": "cpu", **limits})
    model = snapshots.describe(settings.choice())
    prep = Preprocessor(settings.preprocess_config(model), ContentTokenizer.load(snapshot))
    many = copies_of(read_jobs(jobs), copies)
    bodies = [json.dumps(score_body(many[i : i + inputs])).encode() for i in range(0, len(many), inputs)]
    header = RequestHeader("benchmark", SCORE, True, None, time.monotonic())
    return [prep.prepare(body, header).plan for body in bodies]


def first_pass(plans: list[ScorePlan], budget: int) -> PackedPass:
    """What the scheduler gives to the first pass, all plans waiting."""
    scheduler = Scheduler(budget, 2 * budget)
    for key, plan in enumerate(plans):
        scheduler.add(key, plan)
    return build_pass(scheduler.next_pass())


def job_pass(snapshot: Path, jobs: Path, budget: int) -> PackedPass:
    """The first full pass of a job set with eight requests of eight articles waiting."""
    return first_pass(job_plans(snapshot, jobs, 8, 8)[:8], budget)


def synthetic_pass(budget: int) -> PackedPass:
    """Contents of 512 tokens under 56 questions of 12, as many as fit whole or in part."""
    size = _CONTENT + _QUESTIONS * _QUESTION
    jobs = budget // size + 1
    index = np.arange(size, dtype=np.int32)
    parents = index - 1
    parents[_CONTENT::_QUESTION] = _CONTENT - 1
    reads = np.arange(_CONTENT + _QUESTION - 1, size, _QUESTION, dtype=np.int32)
    starts = np.arange(jobs, dtype=np.int32) * size
    shifted = np.where(parents < 0, -1, parents + starts[:, None])
    rows = (reads + starts[:, None]).reshape(-1)
    plan = ScorePlan(
        tokens=np.zeros(jobs * size, np.int32),
        parents=shifted.reshape(-1).astype(np.int32),
        job_offsets=np.arange(jobs + 1, dtype=np.int64) * size,
        prefix_lens=np.full(jobs, _CONTENT, np.int32),
        read_rows=rows.astype(np.int32),
        col_offsets=np.arange(len(rows) + 1, dtype=np.int64) * 2,
        cols=np.tile(np.array([5, 6], np.int32), len(rows)),
    )
    return first_pass([plan], budget)


def row_positions(packed: PackedPass) -> I64:
    """Path positions of the real rows [T]."""
    return packed.positions[: len(packed.tokens)]
