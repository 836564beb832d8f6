"""`Preprocessor`: everything between a request's bytes and its plan, and back. No sockets, safe to share by threads."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from spinf_serve.config import PreprocessConfig
from spinf_serve.packs.use import Shelf, asks_packs
from spinf_serve.plan import ScorePlan, ScoreResult
from spinf_serve.protocol.body import decode_body
from spinf_serve.protocol.errors import RequestError
from spinf_serve.protocol.jobs import JobsRequest, read_jobs
from spinf_serve.protocol.json import loads
from spinf_serve.protocol.request import ScoreRequest, read_request
from workers.preprocess.assemble import Answer, assemble_response
from workers.preprocess.compile import compile_request
from workers.preprocess.encoder import Encoder, Tokenizer
from workers.preprocess.jobs import JobsLayout, assemble_jobs, compile_jobs
from workers.preprocess.layout import ScoreLayout

SCORE, CHAT, V0_SCORE = "score", "chat", "v0_score"


@dataclass(frozen=True, slots=True)
class RequestHeader:
    """What the frontend knows of a request without its body.

    route               score | chat | v0_score
    trusted             the caller carries the trusted token
    content_encoding    the header of that name, or None
    received            `time.monotonic()` when the body was whole
    """

    request_id: str
    route: str
    trusted: bool
    content_encoding: str | None
    received: float


class Response(Protocol):
    """What a prepared request needs to answer: its layout, in the shape of its route."""

    def to_bytes(self, result: ScoreResult) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that waits for the engine. `log`: counts for the log line and the metrics, never content."""

    plan: ScorePlan
    response: Response
    log: dict[str, int]


@dataclass(frozen=True, slots=True)
class _ScoreResponse:
    layout: ScoreLayout
    answer: Answer

    def to_bytes(self, result: ScoreResult) -> bytes:
        return assemble_response(self.layout, result, self.answer)


@dataclass(frozen=True, slots=True)
class _JobsResponse:
    layout: JobsLayout
    answer: Answer

    def to_bytes(self, result: ScoreResult) -> bytes:
        return assemble_jobs(self.layout, result, self.answer)


class Preprocessor:
    """Turns bodies into plans and results into responses."""

    def __init__(
        self, config: PreprocessConfig, tokenizer: Tokenizer, shelf: Callable[[], Shelf] | None = None
    ) -> None:
        """`shelf` gives the packs at the first request that asks for any, instead of the config's files."""
        self.config = config
        self._encoder = Encoder(tokenizer)
        packed = Shelf.of(config.pack_files)
        self._shelf = shelf or (lambda: packed)

    def prepare(self, body: bytes, header: RequestHeader) -> Prepared:
        """Parses, checks and compiles one body. Raises `RequestError` with the first fault in document order."""
        started = time.perf_counter()
        config = self.config
        request = read_body(body, header, config, self._shelf)
        if isinstance(request, JobsRequest):
            return self._prepare_jobs(request, header, started)
        compiled = compile_request(request, self._encoder, config.max_tokens)
        answer = self._answer(header, started, model=request.model or config.model.id)
        usage = compiled.layout.usage
        log = {
            "inputs": len(request.inputs),
            "queries": len(compiled.layout.asked),
            "prompts": usage.prompts,
            "tokens": usage.processed_tokens,
            "content_tokens": usage.content_tokens,
            "query_tokens": usage.query_tokens,
            "floor_tokens": usage.floor_tokens,
        }
        return Prepared(compiled.plan, _ScoreResponse(compiled.layout, answer), log)

    def _prepare_jobs(self, request: JobsRequest, header: RequestHeader, started: float) -> Prepared:
        plan, layout = compile_jobs(request, self._encoder, self.config.max_tokens)
        prompts = sum(len(job.prompts) for job in request.jobs)
        log = {"inputs": len(request.jobs), "queries": prompts, "prompts": prompts, "tokens": len(plan.tokens)}
        return Prepared(plan, _JobsResponse(layout, self._answer(header, started)), log)

    def _answer(self, header: RequestHeader, started: float, model: str = "") -> Answer:
        return Answer(
            request_id=header.request_id,
            model=model,
            received=header.received,
            compile_ms=(time.perf_counter() - started) * 1000,
            internal=header.trusted or self.config.debug,
            choices=header.route == CHAT,
        )

    def assemble(self, prepared: Prepared, result: ScoreResult) -> bytes:
        """The response body. Raises `RequestError` engine_error where the engine's numbers cannot be an answer."""
        if result.logprobs.shape != prepared.plan.cols.shape:
            raise RequestError("engine_error", "the engine returned another number of values than was asked for")
        return prepared.response.to_bytes(result)


def read_body(
    body: bytes, header: RequestHeader, config: PreprocessConfig, shelf: Callable[[], Shelf]
) -> ScoreRequest | JobsRequest:
    """The request that a body holds, as far as it can be checked without a tokenizer. Raises `RequestError`."""
    value = loads(decode_body(body, header.content_encoding, config.max_body_bytes))
    if header.route == V0_SCORE:
        return read_jobs(value, config.limits)
    return read_request(
        value,
        config.model,
        config.limits,
        trusted=header.trusted,
        needs_scoring=header.route == CHAT,
        shelf=shelf() if asks_packs(value) else Shelf(),
    )


def error_body(error: BaseException, header: RequestHeader) -> bytes:
    """The error envelope; an exception that nobody expected says nothing about itself."""
    if not isinstance(error, RequestError):
        error = RequestError("engine_error", "the request failed inside the server")
    return json.dumps(error.envelope(header.request_id, rejected=header.trusted), ensure_ascii=False).encode()
