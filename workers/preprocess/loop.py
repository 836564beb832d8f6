"""The loop of a preprocess worker: prepare what the frontend hands out, assemble what the engine returns.

One thread, one request prepared at a time; any number of prepared ones wait for the engine. Every request gets exactly
one answer, unless it is cancelled.
"""

import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from spinf_serve.logs import facts
from spinf_serve.plan import ScoreResult
from spinf_serve.protocol.errors import RequestError
from spinf_serve.supervisor.member import Member, Stopped
from spinf_serve.wire.child import Stop
from spinf_serve.wire.engine import CancelJob, ScoreJob
from spinf_serve.wire.errors import QueueFull, WireError
from spinf_serve.wire.frontend import Answer, Credit
from spinf_serve.wire.preprocess import CancelWork, Peers, Scored, Unscored, Work
from spinf_serve.wire.queues import Outbox
from spinf_serve.wire.supervisor import ChildReady
from workers.preprocess.preprocessor import Prepared, Preprocessor, RequestHeader, error_body

log = logging.getLogger(__name__)

POLL_S = 1.0
RETRY_AFTER_S = 5


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A prepared request. `engine` is the address its plan went to, "" while there is no engine."""

    work: Work
    prepared: Prepared
    prepare_ms: float
    engine: str


class PreprocessLoop:
    """Owns the worker's sockets and its open requests."""

    def __init__(self, member: Member, preprocessor: Preprocessor) -> None:
        self._member = member
        self._preprocessor = preprocessor
        self._frontend: Outbox | None = None
        self._engine: Outbox | None = None
        self._generation = 0  # of frontends: credit is owed only to the one that handed out the work
        self._backlog: deque[tuple[int, Any]] = deque()
        self._waiting: dict[str, _Waiting] = {}
        self._unsent: list[Answer] = []  # while there is no frontend

    def run(self, peers: Peers) -> None:
        """Work until told to stop (raises Stopped)."""
        self._meet(peers)
        self._member.tell(ChildReady(self._member.name))
        for message in self._member.waiting:
            self._sort(message)
        while True:
            self._member.progress.leave()
            if not self._backlog:
                self._member.inbox.poll(POLL_S)
            self._take()
            if self._backlog:
                self._member.progress.enter()
                generation, message = self._backlog.popleft()
                self._handle(message, generation)

    # What comes in

    def _take(self) -> None:
        """Sort what is there: news of peers and cancellations count at once, work waits its turn."""
        while True:
            try:
                for message in self._member.inbox.take():
                    self._sort(message)
                return
            except WireError as error:
                log.error("a message was refused", extra=facts(error=str(error)))

    def _sort(self, message: Any) -> None:
        match message:
            case Stop():
                raise Stopped
            case Peers():
                self._meet(message)
            case CancelWork():
                self._cancel(message.request_id)
            case _:
                self._backlog.append((self._generation, message))

    def _cancel(self, request_id: str) -> None:
        kept = [entry for entry in self._backlog if not _is_work(entry[1], request_id)]
        owed = len(self._backlog) - len(kept)
        self._backlog = deque(kept)
        for _ in range(owed):
            self._send_credit()
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None and self._engine is not None and waiting.engine == self._engine.address:
            self._post(self._engine, CancelJob(self._member.name, request_id))

    def _handle(self, message: Any, generation: int) -> None:
        match message:
            case Work():
                self._prepare(message)
                if generation == self._generation:
                    self._send_credit()
            case Scored():
                self._assemble(message.request_id, message.attempt, message.result)
            case Unscored():
                error = RequestError(message.code, message.message, message.param, message.retry_after)
                if waiting := self._pop(message.request_id, message.attempt):
                    self._refuse(waiting.work, error, waiting)

    # Peers

    def _meet(self, peers: Peers) -> None:
        """Open the ways to a new frontend or engine; plans that went down with an engine are answered with 503."""
        if peers.engine != (self._engine.address if self._engine else ""):
            self._meet_engine(peers.engine)
        if peers.frontend != (self._frontend.address if self._frontend else ""):
            if self._frontend is not None:
                self._frontend.close()
            self._frontend = Outbox(peers.frontend) if peers.frontend else None
            self._generation += 1
            self._send_credit()
            unsent, self._unsent = self._unsent, []
            for answer in unsent:
                self._answer(answer)

    def _meet_engine(self, address: str) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = Outbox(address) if address else None
        for request_id, waiting in list(self._waiting.items()):
            if waiting.engine:
                del self._waiting[request_id]
                self._refuse(waiting.work, _restarting(), waiting)
            elif self._engine is not None:
                self._submit(waiting.work, waiting.prepared, waiting.prepare_ms)

    def _send_credit(self) -> None:
        if self._frontend is not None:
            self._post(self._frontend, Credit(self._member.name, self._member.inbox.address))

    def _post(self, outbox: Outbox, message: Any) -> bool:
        try:
            outbox.send(message)
        except QueueFull as error:
            log.error("message not sent", extra=facts(error=str(error)))
            return False
        return True

    # Requests

    def _prepare(self, work: Work) -> None:
        started = time.monotonic()
        try:
            prepared = self._preprocessor.prepare(work.body, _header(work))
        except RequestError as error:
            self._refuse(work, error)
            return
        except Exception:
            self._refuse(work, self._unexpected(work, "preparing"))
            return
        # Whoever left meanwhile costs no pass: his cancellation is here already, and must find what it cancels.
        self._waiting[work.request_id] = _Waiting(work, prepared, (time.monotonic() - started) * 1000, engine="")
        self._take()
        waiting = self._waiting.get(work.request_id)
        if waiting is not None and not waiting.engine:
            self._submit(work, prepared, waiting.prepare_ms)

    def _submit(self, work: Work, prepared: Prepared, prepare_ms: float) -> None:
        """Send the plan, or keep it until there is an engine (the frontend refuses the call if that takes long)."""
        if self._engine is None:
            return
        job = ScoreJob(self._member.name, self._member.inbox.address, work.request_id, work.attempt, prepared.plan)
        if self._post(self._engine, job):
            self._waiting[work.request_id] = _Waiting(work, prepared, prepare_ms, self._engine.address)
        else:
            waiting = self._waiting.pop(work.request_id)
            self._refuse(work, RequestError("concurrency_limit", "the engine is behind", retry_after=1), waiting)

    def _pop(self, request_id: str, attempt: int) -> _Waiting | None:
        """The request that a result is for; None when it was cancelled or given up."""
        waiting = self._waiting.get(request_id)
        if waiting is None or waiting.work.attempt != attempt:
            return None
        return self._waiting.pop(request_id)

    def _assemble(self, request_id: str, attempt: int, result: ScoreResult) -> None:
        waiting = self._pop(request_id, attempt)
        if waiting is None:
            return
        try:
            body = self._preprocessor.assemble(waiting.prepared, result)
        except RequestError as error:
            self._refuse(waiting.work, error, waiting, result)
        except Exception:
            self._refuse(waiting.work, self._unexpected(waiting.work, "assembling"), waiting, result)
        else:
            self._answer(self._reply(waiting.work, 200, None, None, _facts(waiting, result), body))

    def _unexpected(self, work: Work, doing: str) -> RequestError:
        log.exception("%s a request failed", doing, extra=facts(request_id=work.request_id))
        return RequestError("engine_error", "an unexpected error while working on this request")

    def _refuse(
        self, work: Work, error: RequestError, waiting: _Waiting | None = None, result: ScoreResult | None = None
    ) -> None:
        body = error_body(error, _header(work))
        self._answer(self._reply(work, error.status, error.code, error.retry_after, _facts(waiting, result), body))

    def _reply(
        self, work: Work, status: int, code: str | None, retry_after: int | None, known: dict[str, Any], body: bytes
    ) -> Answer:
        return Answer(
            worker=self._member.name,
            request_id=work.request_id,
            attempt=work.attempt,
            status=status,
            code=code,
            retry_after=retry_after,
            facts=known,
            body=body,
        )

    def _answer(self, answer: Answer) -> None:
        if self._frontend is None or not self._post(self._frontend, answer):
            self._unsent.append(answer)


def _is_work(message: Any, request_id: str) -> bool:
    return isinstance(message, Work) and message.request_id == request_id


def _header(work: Work) -> RequestHeader:
    return RequestHeader(work.request_id, work.route, work.trusted, work.content_encoding, work.received)


def _restarting() -> RequestError:
    return RequestError("model_unavailable", "the engine is being restarted", retry_after=RETRY_AFTER_S)


def _facts(waiting: _Waiting | None, result: ScoreResult | None) -> dict[str, Any]:
    """Counts and milliseconds for the log line and the metrics."""
    known: dict[str, Any] = {}
    if waiting is not None:
        known |= {**waiting.prepared.log, "prepare_ms": round(waiting.prepare_ms, 1)}
    if result is not None:
        known |= {
            "packed_tokens": result.packed_tokens,
            "passes": result.passes,
            "queue_ms": round(result.queue_ms, 1),
            "score_ms": round(result.score_ms, 1),
            "gpu_ms": round(result.busy_ms, 1),
        }
    return known
