"""`ScoringEngine`: plans in, log-probabilities out. One object, no sockets; one thread calls it."""

import contextlib
import gc
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from spinf_serve.config import EngineConfig
from spinf_serve.plan import F32, Completion, EngineInfo, ScorePlan
from workers.engine.apart import Apart
from workers.engine.clock import Clock
from workers.engine.compiles import CompileCounter
from workers.engine.failures import is_out_of_memory, request_error
from workers.engine.load import Report, load
from workers.engine.memory import Memory, forget_frames
from workers.engine.packing import Share, build_pass
from workers.engine.pipeline import AnyRunner, InFlight, Pace, launch
from workers.engine.scheduler import Scheduler
from workers.engine.stats import EngineStats
from workers.engine.ticket import Ticket
from workers.engine.validate import check_plan
from workers.engine.warmup import warm_up

log = logging.getLogger(__name__)

_POLL_S, _FAR_POLL_S = 0.0005, 0.002
"""Between two looks at a running pass: near the time when the next one is due, and before."""

_NEAR_S = 0.02

_Id = int
"""A plan's own number: a caller's key may come back while a pass still holds the plan that had it before."""


class ScoringEngine:
    """Loads a model and scores plans of several requests in shared passes.

    Not thread-safe: one thread calls submit, cancel and step. On a device that works beside the host the next pass is
    queued there before the running one is read, so that it never waits for the host. On the CPU the next full pass is
    staged in a thread of the engine's own while the current one runs.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: AnyRunner,
        info: EngineInfo,
        *,
        window: int = 0,
        memory: Memory | None = None,
        compiles: CompileCounter | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Use `load`. window: the largest of the model's layers, for the warm-up; memory, compiles, clock: on a GPU."""
        self.config, self.info = config, info
        self.degraded: str | None = None
        self.host_turn: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        """Entered for the host's work of a pass, where other threads of the process compute too: see `Turns.first`."""
        self._runner, self._window, self._memory, self._compiles = runner, window, memory, compiles
        self._clock = clock
        self._is_async = hasattr(runner, "launch")
        self._scheduler = Scheduler(config.token_budget, config.max_tokens, shared=info.batch_invariant)
        self._numbers = itertools.count()
        self._ids: dict[Hashable, _Id] = {}
        self._tickets: dict[_Id, Ticket] = {}
        self._done: list[Completion] = []
        self._stats = EngineStats()
        self._planned: deque[list[Share]] = deque()  # passes taken from the scheduler that do not run yet
        self._prepared: Future[Any] | None = None  # the staging of the first of them
        self._preparer = ThreadPoolExecutor(1, "prepare-pass", initializer=self._use_device)
        self._in_flight: deque[InFlight] = deque()
        self._apart = Apart()
        self._leaving: set[_Id] = set()  # dropped while a pass in flight holds them
        self._pace = Pace()
        self._last_end = 0.0
        self._one_at_a_time = False  # a pass did not fit behind another
        self._check_memory = False

    @classmethod
    def load(cls, config: EngineConfig, on_progress: Report | None = None) -> "ScoringEngine":
        """Read the snapshot, check the machine, fix the fingerprint. LoadError for what no retry can cure."""
        loaded = load(config, on_progress)
        return cls(
            config,
            loaded.runner,
            loaded.info,
            window=loaded.model_config.sliding_window,
            memory=loaded.memory,
            compiles=loaded.compiles,
            clock=loaded.clock,
        )

    @property
    def has_work(self) -> bool:
        """Whether `step` would run a pass or hand out completions."""
        return bool(self._done or self._in_flight or self._planned or len(self._scheduler) or len(self._apart))

    def submit(self, key: Hashable, plan: ScorePlan) -> None:
        """Queue a plan under a key of the caller's, unused so far. RequestError when the plan cannot be run."""
        if key in self._ids:
            raise ValueError(f"key {key!r} is in use")
        check_plan(plan, self.info.vocab_size, self.config.max_tokens)
        number = self._ids[key] = next(self._numbers)
        self._tickets[number] = Ticket(key, plan)
        if self._apart:
            self._apart.wait(number)
        else:
            self._enter(number)

    def _enter(self, number: _Id) -> None:
        self._scheduler.add(number, self._tickets[number].plan)
        if number not in self._scheduler:
            self._complete(number)

    def cancel(self, key: Hashable) -> None:
        """Drop what the plan still has to run, and its result. Unknown and finished keys are no error."""
        self._done = [completion for completion in self._done if completion.key != key]
        number = self._ids.pop(key, None)
        if number is not None:
            del self._tickets[number]
            self._drop(number)

    def step(self, arrivals: Callable[[], None] | None = None) -> list[Completion]:
        """Run at most one pass to its end; returns what is finished since the last call, [] when idle.

        arrivals: called again and again while a pass runs on a device beside the host; it may submit and cancel, and
        what it brings goes into the next pass.
        """
        self._use_device()
        if self._in_flight or self._start_next():
            if self._is_async:
                self._keep_busy(arrivals)
            else:
                self._prepare_next()
            self._finish(self._in_flight[0])
        self._settle_memory()
        done, self._done = self._done, []
        return done

    def warm_up(self, on_progress: Report | None = None) -> None:
        """Run the passes that `config.warmup` asks for, so that no request waits for a compilation."""
        started = time.monotonic()
        self._use_device()
        warm_up(self.config, self._runner, self._window, self._memory, self._compiles, on_progress)
        compiled = 0 if self._compiles is None else self._compiles.compiled
        self.info = replace(self.info, warmup_s=time.monotonic() - started, compiles=compiled)

    def stats(self) -> dict[str, Any]:
        """Counters since the load, gauges of now, and (tokens, occupancy) of each pass since the last call."""
        return {
            "passes": self._stats.passes,
            "failed_passes": self._stats.failed_passes,
            "packed_tokens": self._stats.packed_tokens,
            "padded_tokens": self._stats.padded_tokens,
            "busy_s": self._stats.busy_s,
            "requests": len(self._tickets),
            "tokens_waiting": self._scheduler.tokens_waiting,
            "stored_bytes": self._runner.stored_bytes,
            **({} if self._memory is None else self._memory.figures()),
            **({} if self._compiles is None else {"late_compiles": self._compiles.late}),
            "pass_samples": self._stats.take_samples(),
        }

    def close(self) -> None:
        """Free the model. Plans that still wait are dropped without a completion; may be called twice."""
        self._preparer.shutdown(wait=True, cancel_futures=True)
        self._read_unseen(list(self._in_flight))
        self._in_flight.clear()
        self._planned.clear()
        self._prepared = None
        self._ids.clear()
        self._tickets.clear()
        self._apart.clear()
        self._done.clear()
        self._runner.close()
        gc.collect()

    def _use_device(self) -> None:
        if self._memory is not None:
            self._memory.allocator.use()

    # Passes

    def _next_shares(self) -> tuple[list[Share], Any]:
        """The shares of the next pass, without those of plans that left; and its staging, where it is still good."""
        prepared, self._prepared = self._prepared, None
        while True:
            shares = self._planned.popleft() if self._planned else self._scheduler.next_pass()
            live = [share for share in shares if share.key in self._tickets]
            if live or not shares:
                return live, prepared if len(live) == len(shares) else None
            prepared = None

    def _start_next(self) -> bool:
        """Launch a pass while none is in flight. When that fails, find out whose fault it is."""
        self._one_at_a_time = False
        if self._apart and not self._planned and not len(self._scheduler):
            for number in self._apart.enter():
                self._enter(number)
        shares, prepared = self._next_shares()
        if not shares:
            return False
        try:
            self._launch(shares, prepared)
        except Exception as error:
            self._blame(shares, error)
            return False
        return True

    def _start_behind(self) -> None:
        """Queue a pass behind the running one. When that fails, it gets the device to itself before it is judged."""
        shares, prepared = self._next_shares()
        if not shares:
            return
        try:
            self._launch(shares, prepared)
        except Exception as error:
            self._raise_if_lost(error)
            forget_frames(error)
            self._planned.appendleft(shares)
            self._one_at_a_time = True

    def _launch(self, shares: list[Share], prepared: Future[Any] | None) -> None:
        staged = None if prepared is None else prepared.result()
        asked = time.monotonic()
        with self.host_turn():
            began = time.monotonic()
            self._pace.waited(began - asked)
            if staged is None:
                staged = self._runner.stage(build_pass(shares))
                self._pace.staged(time.monotonic() - began)
            ready = time.monotonic()
            self._in_flight.append(launch(self._runner, staged, self._clock))
            self._pace.launched(time.monotonic() - ready)

    def _keep_busy(self, arrivals: Callable[[], None] | None) -> None:
        """Until the running pass is done: take what arrives, and queue the next pass in time."""
        running = self._in_flight[0]
        while not running.pending.done():
            if self._may_queue:
                self._prepare_next()
                if (early := self._early(running)) <= 0:
                    self._start_behind()
                else:
                    time.sleep(min(early, _POLL_S if early < _NEAR_S else _FAR_POLL_S))
            elif arrivals is None:
                return
            else:
                time.sleep(_POLL_S)
            if arrivals is not None:
                arrivals()
        if self._may_queue:
            self._start_behind()  # before the results: the device waits

    @property
    def _may_queue(self) -> bool:
        waits = bool(self._planned or len(self._scheduler))
        return waits and len(self._in_flight) == 1 and not self._one_at_a_time and not self._check_memory

    def _early(self, running: InFlight) -> float:
        """Seconds until the next pass is due: as late as the running one's end allows, for more may join it."""
        elapsed = time.monotonic() - max(running.launched, self._last_end)
        lead = self._pace.launch_lead if self._planned else self._pace.lead
        return self._pace.left(running.tokens, elapsed) - lead

    def _prepare_next(self) -> None:
        """Pack and stage the next pass beside the running one, when what waits fills it: it cannot get better."""
        if self._planned or self._scheduler.tokens_waiting < self.config.token_budget:
            return
        shares = self._scheduler.next_pass()
        self._planned.append(shares)
        self._prepared = self._preparer.submit(self._stage, shares)

    def _stage(self, shares: list[Share]) -> Any:
        with self.host_turn():
            return self._runner.stage(build_pass(shares))

    def _finish(self, running: InFlight) -> None:
        """Read a pass and hand out its values; when it raises, find out which plan does."""
        try:
            values = running.pending.wait()
        except Exception as error:
            self._stats.failed_passes += 1
            self._run_again_behind()
            self._blame(list(running.shares), error)
            return
        self._in_flight.popleft()
        self._hand_out(running, values)

    def _run_again_behind(self) -> None:
        """A pass failed: those behind it may have read what it was to store, and are staged and run anew."""
        self._read_unseen(list(self._in_flight)[1:])
        behind = [list(flight.shares) for flight in self._in_flight][1:]
        self._in_flight.clear()
        if self._prepared is not None:
            wait([self._prepared])
            self._prepared = None
        self._planned.extendleft(reversed(behind))
        self._free_leaving()

    def _read_unseen(self, flights: list[InFlight]) -> None:
        """Wait for passes whose values nobody wants. One that never ran by itself needs no wait."""
        for flight in flights if self._is_async else []:
            with contextlib.suppress(Exception):
                flight.pending.wait()

    def _blame(self, shares: list[Share], error: Exception) -> None:
        """A pass failed: the plans of a shared one run again each alone, so that only the one at fault fails.

        Who left while it ran may be the one at fault.
        """
        self._raise_if_lost(error)
        keys = list(dict.fromkeys(share.key for share in shares))
        if len(keys) < 2:
            for key in self._tickets.keys() & keys:
                self._fail(key, error)
            return
        log.warning("a pass of %d requests failed (%s): each is run again alone", len(keys), type(error).__name__)
        self._give_back(error)
        for key in [key for key in keys if key in self._tickets]:
            try:
                staged = self._runner.stage(build_pass([share for share in shares if share.key == key]))
                running = launch(self._runner, staged, self._clock)
                values = running.pending.wait()
            except Exception as own_error:
                self._raise_if_lost(own_error)
                self._fail(key, own_error)
            else:
                self._hand_out(running, values)

    def _raise_if_lost(self, error: Exception) -> None:
        """A device that a fault has stopped cannot be used again by this process: the error ends it."""
        if self._memory is not None and not self._memory.allocator.works():
            raise error

    def _hand_out(self, flight: InFlight, values: F32) -> None:
        packed, pass_tokens = flight.staged.packed, flight.tokens
        started, ended = flight.times(self._last_end)
        self._last_end = ended
        self._stats.ran(pass_tokens, flight.staged.padded_tokens, ended - started)
        self._pace.ran(pass_tokens, ended - started)
        tokens: Counter[_Id] = Counter()
        for i, share in enumerate(packed.shares):
            ticket = self._tickets.get(share.key)
            if ticket is None:
                continue  # it left while the pass ran
            entries = slice(int(packed.share_entries[i]), int(packed.share_entries[i + 1]))
            ticket.logprobs[packed.targets[entries]] = values[entries]
            tokens[share.key] += share.piece.tokens
            if share.piece.last == share.plan.job_offsets[share.piece.job + 1]:
                self._runner.free_job(share.key, share.piece.job)
        for key, count in tokens.items():
            self._tickets[key].ran(started, ended, count, pass_tokens)
            if not self._is_waiting(key):
                self._complete(key)
        self._free_leaving()

    def _is_waiting(self, key: _Id) -> bool:
        """Whether a pass to come, or one in flight, still holds anything of a plan."""
        planned = any(share.key == key for shares in self._planned for share in shares)
        return planned or key in self._scheduler or any(flight.holds(key) for flight in self._in_flight)

    # Ends

    def _drop(self, key: _Id) -> None:
        """Forget what a plan still has to run and free what it holds, but nothing that a pass in flight may read."""
        if self._prepared is not None:
            wait([self._prepared])  # it may be making stores for the plan
        self._scheduler.remove(key)
        self._apart.remove(key)
        self._leaving.add(key)
        self._free_leaving()

    def _free_leaving(self) -> None:
        for key in [key for key in self._leaving if not any(flight.holds(key) for flight in self._in_flight)]:
            self._leaving.discard(key)
            self._runner.free(key)

    def _complete(self, key: _Id) -> None:
        ticket = self._tickets.pop(key)
        self._ids.pop(ticket.key)
        self._runner.free(key)
        self._done.append(Completion(ticket.key, result=ticket.result(self.info.fingerprint)))

    def _fail(self, key: _Id, error: Exception) -> None:
        """End one plan with an error; everything that it holds is freed. Beside what others stored it may try again."""
        self._drop(key)
        if is_out_of_memory(error) and self._runner.stored_bytes:
            self._set_apart(key)
        else:
            ticket = self._tickets.pop(key)
            self._ids.pop(ticket.key)
            self._done.append(Completion(ticket.key, error=request_error(error)))
        self._give_back(error)

    def _set_apart(self, key: _Id) -> None:
        """Forget what of a plan was to run; it begins anew once the others are done."""
        self._prepared = None  # `_drop` has waited for it
        others = ([share for share in shares if share.key != key] for shares in self._planned)
        self._planned = deque(shares for shares in others if shares)
        self._apart.failed(key)

    def _give_back(self, error: Exception) -> None:
        """Free what a failed pass held; where memory was short, see to it that all of it came back."""
        forget_frames(error)
        if self._memory is not None and is_out_of_memory(error):
            self._check_memory = True
            self._memory.release()

    def _settle_memory(self) -> None:
        """After a pass that did not fit, once nothing runs: is all of its memory back?"""
        if self._check_memory and not self._in_flight and self._memory is not None:
            self._check_memory = False
            if reason := self._memory.leaked(self._runner.stored_bytes):
                log.error("degraded: %s", reason)
                self.degraded = reason
