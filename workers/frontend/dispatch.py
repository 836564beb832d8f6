"""Which worker gets which request, and what becomes of requests whose worker dies. A plain object without sockets.

Work is handed out by credit, oldest first; a worker's next credit says that the request is prepared. When a worker
dies, the request that it was preparing is to blame, and is tried once more; what only waited for the engine goes
elsewhere without blame. Of a worker that prepared nothing every request is to blame: any of them may have ended it.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from spinf_serve.protocol.errors import RequestError
from spinf_serve.wire.frontend import Answer, Credit
from spinf_serve.wire.preprocess import CancelWork, Work

MAX_ATTEMPTS = 2
SETTLE_S = 0.25
"""Between a worker's death and the retry of what it held: where several die at once, none of them gets it."""
REMEMBERED_LOSSES = 64

Outcome = Answer | RequestError
Post = Callable[[str, Any], bool]
"""(inbox, message) → whether it was sent."""
Later = Callable[[float, Callable[[], None]], object]
"""(seconds, what to do then)."""


@dataclass(eq=False)
class _Open:
    """An accepted request without a reply."""

    work: Work
    deliver: Callable[[Outcome], None]
    worker: str | None = None

    @property
    def suspect(self) -> bool:
        return self.work.attempt > 1


@dataclass
class _Worker:
    inbox: str
    credits: int = 0
    holds: set[str] = field(default_factory=set)  # request ids
    preparing: str | None = None  # handed out since the last credit


class Dispatcher:
    """Every submitted request gets exactly one outcome, unless it is cancelled first."""

    def __init__(self, post: Post, later: Later) -> None:
        self._post = post
        self._later = later
        self._open: dict[str, _Open] = {}
        self._queue: deque[str] = deque()
        self._workers: dict[str, _Worker] = {}
        self._lost: deque[str] = deque(maxlen=REMEMBERED_LOSSES)
        self.dropped = 0
        """Answers that came without anybody waiting for them."""

    @property
    def waiting(self) -> int:
        """Requests that no worker has yet."""
        return sum(entry.worker is None for entry in self._open.values())

    @property
    def running(self) -> int:
        """Requests that a worker or the engine has."""
        return len(self._open) - self.waiting

    def submit(self, work: Work, deliver: Callable[[Outcome], None]) -> None:
        """Accept a request; `deliver` is called once, with its answer or the error that ends it."""
        self._open[work.request_id] = _Open(work, deliver)
        self._queue.append(work.request_id)
        self._hand_out()

    def cancel(self, request_id: str) -> None:
        """The caller is gone: no outcome will be delivered, and the worker is told."""
        entry = self._open.pop(request_id, None)
        if entry is not None:
            self._take_back(entry)
            self._hand_out()

    def fail_all(self, error: RequestError) -> None:
        """End every open request with `error`."""
        for request_id in list(self._open):
            entry = self._open.pop(request_id)
            self._take_back(entry)
            entry.deliver(error)
        self._queue.clear()
        self._hand_out()

    def _take_back(self, entry: _Open) -> None:
        worker = self._workers.get(entry.worker or "")
        if worker is not None:
            worker.holds.discard(entry.work.request_id)
            self._post(worker.inbox, CancelWork(entry.work.request_id))

    def credit(self, message: Credit) -> None:
        """A worker can take one more request."""
        if message.worker in self._lost:
            return
        worker = self._workers.setdefault(message.worker, _Worker(message.inbox))
        worker.credits += 1
        worker.preparing = None
        self._hand_out()

    def answer(self, message: Answer) -> None:
        """A request's final reply, of whichever attempt; one that nobody waits for is counted and dropped."""
        entry = self._open.pop(message.request_id, None)
        if entry is None:
            self.dropped += 1
            return
        if entry.worker == message.worker:
            self._workers[message.worker].holds.discard(message.request_id)
        else:  # the first attempt was answered after all
            self._take_back(entry)
        entry.deliver(message)
        self._hand_out()

    def worker_lost(self, name: str) -> str | None:
        """A worker is dead: what it held is tried once more elsewhere, or fails. Returns its inbox, if it was known."""
        self._lost.append(name)
        worker = self._workers.pop(name, None)
        if worker is None:
            return None
        blamed = worker.holds if worker.preparing is None else {worker.preparing}
        held = [self._open[request_id] for request_id in sorted(worker.holds)]
        for entry in held:
            self._take_from_dead(entry, blamed=entry.work.request_id in blamed)
        self._later(SETTLE_S, lambda: self._queue_again(held))
        return worker.inbox

    def _take_from_dead(self, entry: _Open, *, blamed: bool) -> None:
        request_id = entry.work.request_id
        if blamed and entry.work.attempt >= MAX_ATTEMPTS:
            del self._open[request_id]
            entry.deliver(RequestError("engine_error", "the processes that worked on this request died"))
            return
        if blamed:
            entry.work = replace(entry.work, attempt=entry.work.attempt + 1)
        entry.worker = None

    def _queue_again(self, entries: list[_Open]) -> None:
        """In front of newer requests, the oldest first; those that are over by then fall out when their turn comes."""
        self._queue.extendleft(entry.work.request_id for entry in reversed(entries))
        self._hand_out()

    def _hand_out(self) -> None:
        while self._queue:
            entry = self._open.get(self._queue[0])
            if entry is None or entry.worker is not None:  # answered or cancelled since
                self._queue.popleft()
                continue
            name = self._choose()
            if name is None:
                return
            worker = self._workers[name]
            if not self._post(worker.inbox, entry.work):
                worker.credits = 0
                continue
            self._queue.popleft()
            worker.credits -= 1
            worker.holds.add(entry.work.request_id)
            worker.preparing = entry.work.request_id
            entry.worker = name

    def _choose(self) -> str | None:
        """Of the workers with a credit, one that holds no suspect, and then the one that holds least."""

        def risk(name: str) -> tuple[bool, int]:
            holds = self._workers[name].holds
            return any(self._open[request_id].suspect for request_id in holds), len(holds)

        able = [name for name, worker in self._workers.items() if worker.credits > 0]
        return min(able, key=risk, default=None)
