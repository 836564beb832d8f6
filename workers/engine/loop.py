"""The loop of the engine process: take, step, send. Sockets live in a thread, so encoding overlaps the passes."""

import contextlib
import logging
import os
import threading
import time
from collections import deque
from typing import Any

import numpy as np

from spinf_serve.logs import facts
from spinf_serve.plan import Completion
from spinf_serve.protocol.errors import RequestError
from spinf_serve.supervisor.member import Member, Stopped
from spinf_serve.wire.child import Stop
from spinf_serve.wire.engine import CancelJob, ScoreJob, WorkerGone
from spinf_serve.wire.errors import WireError
from spinf_serve.wire.preprocess import Scored, Unscored
from spinf_serve.wire.queues import Outbox
from spinf_serve.wire.supervisor import ChildReady, Degraded, EngineStats
from workers.engine.engine import ScoringEngine

log = logging.getLogger(__name__)

POLL_S = 1.0
STATS_S = 0.25
REMEMBERED_LOSSES = 64
Key = tuple[str, str]
"""(worker, request id): a retry of a request comes from another worker."""


class Post:
    """The socket thread and its two queues. The main thread calls `take` and `send`; the thread does the rest."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._arrived: deque[Any] = deque(member.waiting)
        self._leaving: deque[tuple[str, Any]] = deque()
        self._news = threading.Condition()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._outboxes: dict[str, Outbox] = {}
        self._workers: dict[str, str] = {}  # name → address
        self._gone: deque[str] = deque(maxlen=REMEMBERED_LOSSES)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sockets", daemon=True)
        self._thread.start()

    def take(self, wait_s: float) -> list[Any]:
        """What arrived since the last call; waits up to `wait_s` for something."""
        with self._news:
            if not self._arrived:
                self._news.wait(wait_s)
            taken = list(self._arrived)
            self._arrived.clear()
        return taken

    def send(self, address: str, message: Any) -> None:
        """Queue a message for an inbox; "" is the supervisor's."""
        self._leaving.append((address, message))
        os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Send what is queued and end the thread."""
        self._ends.set()
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._ends.is_set():
            self._member.inbox.poll(POLL_S, self._wake_fd)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
            self._receive()
            self._deliver()
        self._deliver()  # what was queued between the last look and the close
        for outbox in self._outboxes.values():
            outbox.close(linger_s=0.5)
        os.close(self._wake_fd)

    def _receive(self) -> None:
        while True:
            try:
                for message in self._member.inbox.take():
                    if not self._note_worker(message):
                        continue
                    with self._news:
                        self._arrived.append(message)
                        self._news.notify()
                return
            except WireError as error:
                log.error("a message was refused", extra=facts(error=str(error)))

    def _note_worker(self, message: Any) -> bool:
        """Keep the addresses up to date; False for a plan that came later than the news of its worker's death."""
        if isinstance(message, ScoreJob):
            if message.worker in self._gone:
                return False
            self._workers[message.worker] = message.reply_to
        elif isinstance(message, WorkerGone):
            self._gone.append(message.worker)
            address = self._workers.pop(message.worker, "")
            if outbox := self._outboxes.pop(address, None):
                outbox.close()
        return True

    def _deliver(self) -> None:
        while self._leaving:
            address, message = self._leaving.popleft()
            if not address:
                self._member.tell(message)
                continue
            if address not in self._workers.values():
                continue  # the worker died; its requests are retried elsewhere
            outbox = self._outboxes.get(address)
            if outbox is None:
                outbox = self._outboxes[address] = Outbox(address)
            try:
                outbox.send(message)
            except WireError as error:
                log.error("message not sent", extra=facts(error=str(error)))


class EngineLoop:
    """Drives a loaded `ScoringEngine` for the workers. For the main thread."""

    def __init__(self, member: Member, engine: ScoringEngine) -> None:
        self._member = member
        self._engine = engine
        self._jobs: dict[Key, ScoreJob] = {}
        self._stats_due: float | None = None
        self._told_degraded = False

    def run(self) -> None:
        """Work until told to stop (raises Stopped)."""
        self._member.tell(self._stats())  # before any call: what the model holds is known
        self._member.tell(ChildReady(self._member.name, self._engine.info))
        self._post = Post(self._member)
        try:
            while True:
                self._take()
                self._send(self._step())
                self._send_stats()
                self._end_if_degraded()
        finally:
            self._post.close()
            self._engine.close()

    def _take(self) -> None:
        idle_s = POLL_S if self._stats_due is None else STATS_S
        self._handle(self._post.take(0.0 if self._engine.has_work else idle_s))

    def _take_arrivals(self) -> None:
        """What came while a pass runs: it may still join the next one."""
        self._handle(self._post.take(0.0))

    def _handle(self, messages: list[Any]) -> None:
        for message in messages:
            match message:
                case Stop():
                    raise Stopped
                case ScoreJob():
                    self._submit(message)
                case CancelJob():
                    self._cancel((message.worker, message.request_id))
                case WorkerGone():
                    for key in [key for key in self._jobs if key[0] == message.worker]:
                        self._cancel(key)

    def _submit(self, job: ScoreJob) -> None:
        key = (job.worker, job.request_id)
        self._jobs[key] = job
        try:
            self._engine.submit(key, job.plan)
        except RequestError as error:
            self._send([Completion(key, error=error)])
        except Exception:
            log.exception("a plan was not accepted", extra=facts(request_id=job.request_id))
            self._send([Completion(key)])

    def _cancel(self, key: Key) -> None:
        if self._jobs.pop(key, None) is not None:
            self._engine.cancel(key)

    def _step(self) -> list[Completion]:
        if not self._engine.has_work:
            return []
        self._member.progress.enter()
        completions = self._engine.step(self._take_arrivals)
        self._member.progress.leave()
        self._stats_due = self._stats_due or time.monotonic()
        return completions

    def _send(self, completions: list[Completion]) -> None:
        for completion in completions:
            job = self._jobs.pop(completion.key, None)
            if job is None:
                continue
            if completion.result is not None:
                self._post.send(job.reply_to, Scored(job.request_id, job.attempt, completion.result))
            else:
                self._post.send(job.reply_to, _unscored(job, completion.error))

    def _send_stats(self) -> None:
        """At most every STATS_S, and once more after the last pass."""
        now = time.monotonic()
        if self._stats_due is None or now < self._stats_due:
            return
        self._stats_due = None if not self._engine.has_work else now + STATS_S
        self._post.send("", self._stats())

    def _stats(self) -> EngineStats:
        numbers = dict(self._engine.stats())
        samples = np.asarray(numbers.pop("pass_samples"), dtype=np.float32).reshape(-1, 2)
        return EngineStats(self._member.name, numbers, samples[:, 0], samples[:, 1])

    def _end_if_degraded(self) -> None:
        """Raises RuntimeError once every call is answered: the supervisor starts another engine."""
        if self._engine.degraded is None:
            return
        if not self._told_degraded:
            self._told_degraded = True
            self._post.send("", Degraded(self._member.name, self._engine.degraded))
        if not self._jobs:
            raise RuntimeError(self._engine.degraded)


def _unscored(job: ScoreJob, error: Exception | None) -> Unscored:
    if not isinstance(error, RequestError):
        error = RequestError("engine_error", "the engine failed on this request")
    return Unscored(job.request_id, job.attempt, error.code, error.message, error.param, error.retry_after)
