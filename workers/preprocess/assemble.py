"""The response to a scoring request, from the engine's numbers to bytes."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from spinf_serve.plan import ScoreResult
from workers.preprocess.layout import ScoreLayout
from workers.preprocess.pack_results import PackResults
from workers.preprocess.questions import Question
from workers.preprocess.readout import Scores, read_scores

DECIMALS = 6
LOW_MASS = 0.9
"""Mean residual above which a query's options are not what the model would say."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the response says beside the scores. Times in milliseconds, `received` in monotonic seconds."""

    request_id: str
    model: str
    received: float
    compile_ms: float
    internal: bool  # with the fields for trusted callers
    choices: bool  # with the empty list that chat clients expect


def assemble_response(layout: ScoreLayout, result: ScoreResult, answer: Answer) -> bytes:
    """The response body. Raises `RequestError` engine_error for numbers that are not finite."""
    scores = read_scores(result.logprobs, layout.reads, layout.gathers, DECIMALS)
    floors = read_scores(result.logprobs, layout.floor_reads, layout.gathers, DECIMALS)
    results = _results(layout, scores, floors)
    fields: dict[str, Any] = {"id": answer.request_id, "object": "score", "created": int(time.time())}
    fields["model"] = answer.model
    if layout.request.endpoint is not None:
        fields["endpoint"] = layout.request.endpoint
    fields["system_fingerprint"] = result.fingerprint
    tail: dict[str, Any] = {"warnings": _warnings(layout, scores), "usage": usage_fields(layout)}
    if answer.internal:
        tail["usage"]["packed_tokens"] = result.packed_tokens
        tail["engine"] = engine_fields(result)
    if answer.choices:
        tail["choices"] = []
    tail["timing"] = timing_fields(result, answer)
    return f'{dumps(fields)[:-1]},"results":[{results}],{dumps(tail)[1:]}'.encode()


def dumps(value: Any) -> str:
    """Compact JSON in which a number that is not finite is an error."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def engine_fields(result: ScoreResult) -> dict[str, Any]:
    """The internal field `engine`."""
    return {
        "fingerprint": result.fingerprint,
        "passes": result.passes,
        "packed_tokens": result.packed_tokens,
        "shared_pass": result.shared_pass,
    }


def timing_fields(result: ScoreResult, answer: Answer) -> dict[str, int]:
    times = {
        "wall_ms": (time.monotonic() - answer.received) * 1000,
        "compile_ms": answer.compile_ms,
        "queue_ms": result.queue_ms,
        "score_ms": result.score_ms,
        "gpu_busy_ms": result.busy_ms,
    }
    return {name: max(0, round(value)) for name, value in times.items()}


def usage_fields(layout: ScoreLayout) -> dict[str, Any]:
    """The public `usage`: logical counts."""
    usage = layout.usage
    options = {text for question in layout.asked for text in question.query.options}
    return {
        "prompt_tokens": usage.processed_tokens,
        "completion_tokens": 0,
        "total_tokens": usage.processed_tokens,
        "prompt_tokens_details": {
            "content_tokens": usage.content_tokens,
            "text_tokens": usage.content_tokens,
            "query_tokens": usage.query_tokens,
            "floor_tokens": usage.floor_tokens,
        },
        "inputs": len(layout.questions),
        "content": {
            "tokens": usage.content_tokens,
            "text_tokens": usage.content_tokens,
            "images": 0,
            "image_tokens": 0,
            "video_frames": 0,
            "video_tokens": 0,
            "audio_seconds": 0,
            "audio_tokens": 0,
        },
        "scoring": {
            "queries": len(layout.asked),
            "combinations": sum(len(question.prompts) for question in layout.asked),
            "options": len(options),
            "prompts": usage.prompts,
            "floor_prompts": usage.floor_prompts,
            "query_tokens": usage.query_tokens,
            "floor_tokens": usage.floor_tokens,
        },
        "processed_tokens": usage.processed_tokens,
    } | pack_usage(layout)


def pack_usage(layout: ScoreLayout) -> dict[str, Any]:
    """The public `usage.packs`, where the call has packs."""
    packs = layout.request.packs
    return {"packs": {"count": len(packs), "query_tokens": layout.usage.pack_tokens}} if packs else {}


class _Frame:
    """The parts of a query's JSON that no number changes, written once for all inputs."""

    def __init__(self, question: Question) -> None:
        self.id = f'{{"id":{dumps(question.query.id)},"combinations":['
        self.combinations = [f'{{"values":{dumps(values)},"options":[' for values in question.query.combinations]
        self.options = [f'{{"text":{dumps(text)},"logprob":' for text in question.query.options]

    def combination(self, number: int, scores: Scores, floor: "_Floor | None") -> str:
        floors = floor.p if floor else ["null"] * len(scores.p)
        rows = zip(self.options, scores.logprobs, scores.p, floors, strict=True)
        options = ",".join(f'{text}{logprob!r},"p":{q!r},"floor_p":{f}}}' for text, logprob, q, f in rows)
        end = f'"residual":{_decimal(scores.residual)},"floor_residual":{floor.residual if floor else "null"}'
        return f"{self.combinations[number]}{options}],{end}}}"


@dataclass(frozen=True, slots=True)
class _Floor:
    """A floor's numbers as JSON."""

    p: list[str]
    residual: str


def _decimal(value: float) -> str:
    return repr(round(value, DECIMALS) + 0.0)


def _results(layout: ScoreLayout, scores: Sequence[Scores], floors: Sequence[Scores]) -> str:
    frames = {question: _Frame(question) for question in layout.asked}
    written = [_Floor([repr(p) for p in floor.p], _decimal(floor.residual)) for floor in floors]
    floor_of = layout.floor_of.tolist()
    packs, hidden = [PackResults(use) for use in layout.request.packs], layout.request.hidden
    hidden_questions = {question for question in layout.asked if question.query in hidden}
    at, results = 0, []
    for item, questions in zip(layout.request.inputs, layout.questions, strict=True):
        queries = []
        for question in questions:
            if question in hidden_questions:
                at += len(question.prompts)
                continue
            frame, rows = frames[question], []
            for number in range(len(question.prompts)):
                floor = written[floor_of[at]] if floor_of[at] >= 0 else None
                rows.append(frame.combination(number, scores[at], floor))
                at += 1
            queries.append(f"{frame.id}{','.join(rows)}]}}")
        entries = _pack_entries(packs, scores, at)
        results.append(f'{{"input_id":{dumps(item.id)},"queries":[{",".join(queries)}]{entries}}}')
    return ",".join(results)


def _pack_entries(packs: Sequence[PackResults], scores: Sequence[Scores], end: int) -> str:
    """The field `packs` of an input whose prompts end at `end`: the packs' are its last ones."""
    if not packs:
        return ""
    at, entries = end - sum(pack.prompts for pack in packs), []
    for pack in packs:
        entries.append(pack.entry(scores[at : at + pack.prompts]))
        at += pack.prompts
    return f',"packs":{dumps(entries)}'


def _warnings(layout: ScoreLayout, scores: Sequence[Scores]) -> list[dict[str, str]]:
    message = "content and question could not be tokenized as one string: they join between two tokens"
    warnings = [{"code": "join_not_merged", "message": message, "input_id": input_id} for input_id in layout.unmerged]
    residuals: dict[Question, list[float]] = {}
    for question, score in zip(_questions_of_prompts(layout), scores, strict=True):
        residuals.setdefault(question, []).append(score.residual)
    # Ids of an input's own queries may come again in another input.
    owners = {query: item.id for item in layout.request.inputs for query in item.own}
    message = "the options hold less than a tenth of the probability: the model would say something else"
    hidden = layout.request.hidden
    for question in layout.asked:
        if question.query in hidden:
            continue
        values = residuals[question]
        if question.options.single_tokens and sum(values) > LOW_MASS * len(values):
            warning = {"code": "low_option_mass", "message": message, "query_id": question.query.id}
            warnings.append(warning | ({"input_id": owners[question.query]} if question.query in owners else {}))
    return warnings


def _questions_of_prompts(layout: ScoreLayout) -> Iterator[Question]:
    for questions in layout.questions:
        for question in questions:
            for _ in question.prompts:
                yield question
