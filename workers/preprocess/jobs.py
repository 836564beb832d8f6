"""`/v0/score` compiled and answered: the engine primitive over whole prompts."""

from dataclasses import dataclass
from typing import Any

from spinf_serve.plan import ScorePlan, ScoreResult
from spinf_serve.protocol.jobs import Job, JobsRequest
from workers.preprocess.assemble import Answer, dumps, engine_fields, timing_fields
from workers.preprocess.encoder import Encoder, Tokens
from workers.preprocess.layout import Reads
from workers.preprocess.options import Reading, short_options
from workers.preprocess.plan_builder import PlanBuilder
from workers.preprocess.readout import read_scores
from workers.preprocess.trie import Branch, ForestBuilder, Gather


@dataclass(frozen=True, slots=True)
class JobsLayout:
    """`reads` holds the prompts job by job; `tokens` and `trees` count what each job's part of the plan holds."""

    request: JobsRequest
    gathers: tuple[Gather, ...]
    reads: Reads
    tokens: tuple[int, ...]
    trees: tuple[int, ...]


def compile_jobs(request: JobsRequest, encoder: Encoder, max_tokens: int) -> tuple[ScorePlan, JobsLayout]:
    """Tokenizes the jobs; the longest common token prefix of a job's prompts is its content.

    An option's tokens are its own, wherever the prompt ends. Where the content ends is a fact of the job and not of a
    prompt, so paths are summed by position. Raises the first fault in document order.
    """
    paths = [_paths(job, request, encoder, max_tokens) for job in request.jobs]
    request.faults.check()
    builder, forests, readings = PlanBuilder(by_position=True), ForestBuilder(), dict[tuple[str, ...], Reading]()
    tokens, trees = [], []
    for job, prompts in zip(request.jobs, paths, strict=True):
        prefix = prompts[0][: _common_prefix(prompts)]
        branches = []
        for number, (path, options) in enumerate(zip(prompts, job.options, strict=True)):
            if options not in readings:
                readings[options] = Reading(tuple((encoder.encode(option),) for option in options))
            branches.append((number, Branch(path[len(prefix) :], readings[options])))
        before = builder.jobs
        builder.add(prefix, forest := forests.build([branches], len(branches)))
        tokens.append(len(prefix) + len(forest.tokens))
        trees.append(builder.jobs - before)
    layout = JobsLayout(request, tuple(forests.gathers), builder.reads(), tuple(tokens), tuple(trees))
    return builder.plan(), layout


def _paths(job: Job, request: JobsRequest, encoder: Encoder, max_tokens: int) -> list[Tokens]:
    """The tokens of every prompt, `<bos>` first; empty where they cannot matter any more."""
    most, faults = request.limits.max_option_tokens, request.faults
    leads = []
    for i, options in enumerate(job.options):
        short = short_options(options, job.options_place.item(i), most, encoder, faults)
        leads.append(max((len(encoder.encode(option)) for option in short), default=1) - 1)
    paths = []
    for i, prompt in enumerate(job.prompts):
        place = job.prompts_place.item(i)
        over = encoder.over(prompt, max_tokens)
        path = () if over or faults.before(place) else encoder.bos + encoder.encode(prompt)
        if over or len(path) + (leads[i] if i < len(leads) else 0) > max_tokens:
            faults.add(place, "content_too_long", f"a prompt and its options have at most {max_tokens} tokens")
        if not prompt and not encoder.bos:
            faults.add(place, "invalid_field", "this model needs a prompt that is not empty")
        paths.append(path)
    return paths


def _common_prefix(paths: list[Tokens]) -> int:
    """The length of the longest prefix that all paths share."""
    first, last = min(paths), max(paths)  # whatever these two share, everything between them shares
    return next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))


def assemble_jobs(layout: JobsLayout, result: ScoreResult, answer: Answer) -> bytes:
    """The response body; numbers are not rounded. Raises `RequestError` engine_error for one that is not finite."""
    scores = iter(read_scores(result.logprobs, layout.reads, layout.gathers))
    rows = zip(layout.request.jobs, layout.tokens, layout.trees, strict=True)
    results: list[dict[str, Any]] = [
        {
            "id": job.id,
            "logprobs": [next(scores).logprobs for _ in job.prompts],
            "packed_tokens": tokens,
            "trees": trees,
        }
        for job, tokens, trees in rows
    ]
    body = {
        "results": results,
        "usage": {"packed_tokens": result.packed_tokens, "forwards": result.passes},
        "timing": timing_fields(result, answer),
        "engine": engine_fields(result),
    }
    return dumps(body).encode()
