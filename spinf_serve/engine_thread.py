"""The thread that owns a `ScoringEngine` in one's own process: the counterpart of the engine process's loop.

Only this thread touches the engine. Plans submitted while a pass runs share the next one.
"""

import itertools
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

from spinf_serve.plan import Completion, ScorePlan, ScoreResult
from spinf_serve.protocol.errors import RequestError

log = logging.getLogger(__name__)


class SteppedEngine(Protocol):
    """What the thread needs of an engine; `workers.engine.engine.ScoringEngine` has it."""

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to run or to report."""
        ...

    def submit(self, key: Any, plan: ScorePlan) -> None:
        """Queue a plan under a key of the caller's."""
        ...

    def cancel(self, key: Any) -> None:
        """Forget a plan; an unknown key is fine."""
        ...

    def step(self, arrivals: Callable[[], None] | None = None) -> list[Completion]:
        """Run at most one pass and return what it finished; `arrivals` is called while it runs."""
        ...


class EngineThread:
    """Runs plans for any number of calling threads. `close` ends it; plans still waiting then fail."""

    def __init__(self, engine: SteppedEngine) -> None:
        self._engine = engine
        self._inbox: queue.SimpleQueue[tuple[int, ScorePlan] | int | None] = queue.SimpleQueue()
        # Not a Future: an interrupt can leave its lock with the caller for ever, and this thread waiting for it.
        self._answers: dict[int, queue.SimpleQueue[ScoreResult | Exception]] = {}
        self._lock = threading.Lock()
        self._keys = itertools.count()
        self._refusal = ""  # why nothing more is accepted
        self._ends = False
        self._thread = threading.Thread(target=self._run, name="spinf-engine", daemon=True)
        self._thread.start()

    def run(self, plan: ScorePlan) -> ScoreResult:
        """Submit a plan and wait for its result. Raises `RequestError`; interrupted (Ctrl-C), it cancels the plan."""
        answer: queue.SimpleQueue[ScoreResult | Exception] = queue.SimpleQueue()
        with self._lock:
            if self._refusal:
                raise RequestError("model_unavailable", self._refusal)
            key = next(self._keys)
            self._answers[key] = answer
            self._inbox.put((key, plan))
        try:
            result = answer.get()
        except BaseException:
            self._inbox.put(key)
            raise
        if isinstance(result, Exception):
            raise result
        return result

    def close(self) -> None:
        """Stop after the running pass and wait for the thread. May be called twice."""
        self._refuse("the engine was closed")
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._take(block=True)
            while not self._ends:
                for completion in self._engine.step(self._take):
                    self._finish(completion)
                self._take(block=True)
        except Exception:
            log.exception("the engine failed")
            self._refuse("the engine failed and was closed")
        finally:
            for key in list(self._answers):
                self._fail(key, RequestError("model_unavailable", self._refusal))

    def _take(self, *, block: bool = False) -> None:
        """Hand what waits to the engine, up to the word to close; may block while there is nothing to run."""
        while not self._ends:
            try:
                item = self._inbox.get(block=block and not self._engine.has_work)
            except queue.Empty:
                return
            if item is None:
                self._ends = True
            elif isinstance(item, int):
                self._engine.cancel(item)
                self._answers.pop(item, None)
            else:
                self._submit(*item)

    def _submit(self, key: int, plan: ScorePlan) -> None:
        """A plan that the engine does not take fails alone."""
        try:
            self._engine.submit(key, plan)
        except RequestError as error:
            self._fail(key, error)
        except Exception:
            log.exception("a plan was not accepted")
            self._fail(key, RequestError("engine_error", "the engine could not take the request"))

    def _finish(self, completion: Completion) -> None:
        if completion.result is None:
            self._fail(completion.key, completion.error or RequestError("engine_error", "the engine gave no result"))
        elif answer := self._answers.pop(completion.key, None):
            answer.put(completion.result)

    def _fail(self, key: int, error: Exception) -> None:
        if answer := self._answers.pop(key, None):
            answer.put(error)

    def _refuse(self, reason: str) -> None:
        with self._lock:
            self._refusal = self._refusal or reason
