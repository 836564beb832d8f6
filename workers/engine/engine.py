"""`ScoringEngine`: plans in, log-probabilities out. One object, no sockets; one thread calls it."""

import gc
import logging
import platform
import time
from collections import Counter
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from spinf_serve import __version__
from spinf_serve.config import EngineConfig
from spinf_serve.plan import F32, Completion, EngineInfo, ScorePlan
from spinf_serve.protocol.errors import RequestError
from workers.engine.errors import LoadError
from workers.engine.fingerprint import cpu_name, fingerprint, score_facts
from workers.engine.models import GemmaModel, model_config
from workers.engine.packing import Share, build_pass
from workers.engine.runner import Runner, StagedPass
from workers.engine.scheduler import Scheduler
from workers.engine.selfcheck import verify_invariance
from workers.engine.stats import EngineStats
from workers.engine.ticket import Ticket
from workers.engine.validate import check_plan
from workers.engine.warmup import warmup_share
from workers.engine.weights import load_weights

log = logging.getLogger(__name__)

_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
"""Schemes of the CPU → the type of the products. A quantized checkpoint is dequantized to it."""

Report = Callable[[str], None]
"""Called with one line of progress for a person."""


class ScoringEngine:
    """Loads a model and scores plans of several requests in shared passes.

    Not thread-safe: one thread calls submit, cancel and step. Internally the next full pass is packed and staged in a
    thread of the engine's own while the current one runs.
    """

    def __init__(self, config: EngineConfig, runner: Runner, info: EngineInfo) -> None:
        """Use `load`."""
        self.config, self.info = config, info
        self._runner = runner
        self._scheduler = Scheduler(config.token_budget, config.max_tokens)
        self._tickets: dict[Hashable, Ticket] = {}
        self._done: list[Completion] = []
        self._stats = EngineStats()
        self._preparer = ThreadPoolExecutor(1, thread_name_prefix="prepare-pass")
        self._next: Future[StagedPass] | None = None
        self._next_shares: list[Share] = []

    @classmethod
    def load(cls, config: EngineConfig, on_progress: Report | None = None) -> "ScoringEngine":
        """Read the snapshot, check the machine, fix the fingerprint. LoadError for what no retry can cure."""
        started = time.monotonic()
        scheme = _scheme(config)
        if config.threads:  # else the library's choice: the cores that the process may use, or OMP_NUM_THREADS
            torch.set_num_threads(config.threads)
        model_facts = model_config(Path(config.model.snapshot_dir))
        model = GemmaModel(model_facts, _DTYPES[scheme])
        load_weights(model, Path(config.model.snapshot_dir), _percent_reporter(on_progress))
        rule, invariant = verify_invariance(
            model.product_shapes(), model_facts.hidden_size, model.head_dims(), _DTYPES[scheme]
        )
        facts = score_facts(config.model, scheme, rule)
        info = EngineInfo(
            fingerprint=fingerprint(facts),
            scheme=scheme,
            batch_invariant=invariant,
            device_name=cpu_name(),
            compute_capability=None,
            token_budget=config.token_budget,
            max_tokens=config.max_tokens,
            vocab_size=model_facts.vocab_size,
            versions=_versions(),
            load_s=time.monotonic() - started,
        )
        log.info("fingerprint %s = %s", info.fingerprint, facts)
        return cls(config, Runner(model, rule), info)

    @property
    def has_work(self) -> bool:
        """Whether `step` would run a pass or hand out completions."""
        return bool(self._done or self._next is not None or len(self._scheduler))

    def submit(self, key: Hashable, plan: ScorePlan) -> None:
        """Queue a plan under a key of the caller's, unused so far. RequestError when the plan cannot be run."""
        if key in self._tickets:
            raise ValueError(f"key {key!r} is in use")
        check_plan(plan, self.info.vocab_size, self.config.max_tokens)
        self._tickets[key] = Ticket(plan)
        self._scheduler.add(key, plan)
        if key not in self._scheduler:
            self._complete(key)

    def cancel(self, key: Hashable) -> None:
        """Drop what the plan still has to run, and its result. Unknown and finished keys are no error."""
        self._done = [completion for completion in self._done if completion.key != key]
        if self._tickets.pop(key, None) is not None:
            self._drop(key)

    def step(self) -> list[Completion]:
        """Run at most one pass; returns what is finished since the last call, [] when idle."""
        staged = self._take_pass()
        if staged is not None:
            self._prepare_next()
            self._run(staged)
        done, self._done = self._done, []
        return done

    def warm_up(self) -> None:
        """Run one short pass, unless `config.warmup` is `none`. On the CPU nothing is compiled: `full` asks no more."""
        started = time.monotonic()
        if self.config.warmup != "none":
            self._runner.run(self._runner.stage(build_pass([warmup_share(self.config)])))
        self.info = replace(self.info, warmup_s=time.monotonic() - started)

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
            "pass_samples": self._stats.take_samples(),
        }

    def close(self) -> None:
        """Free the model. Plans that still wait are dropped without a completion; may be called twice."""
        self._preparer.shutdown(wait=True, cancel_futures=True)
        self._tickets.clear()
        self._done.clear()
        self._runner.close()
        gc.collect()

    def _take_pass(self) -> StagedPass | None:
        """The prepared pass, or one made now; without the shares of plans that were cancelled or failed meanwhile."""
        prepared, self._next = self._next, None
        shares, self._next_shares = self._next_shares, []
        if prepared is None:
            shares = self._scheduler.next_pass()
        live = [share for share in shares if self._is_live(share)]
        if not live:
            return self._take_pass() if len(self._scheduler) else None
        try:
            if prepared is not None and len(live) == len(shares):
                return prepared.result()
            return self._runner.stage(build_pass(live))
        except Exception as error:
            self._run_apart(live, error)
            return None

    def _is_live(self, share: Share) -> bool:
        ticket = self._tickets.get(share.key)
        return ticket is not None and ticket.plan is share.plan

    def _prepare_next(self) -> None:
        """Pack and stage the next pass beside the running one, when what waits fills it: it cannot get better."""
        if self._scheduler.tokens_waiting < self.config.token_budget:
            return
        self._next_shares = shares = self._scheduler.next_pass()
        self._next = self._preparer.submit(lambda: self._runner.stage(build_pass(shares)))

    def _run(self, staged: StagedPass) -> None:
        """Run a pass and hand out its values; when it raises, find out which plan does."""
        started = time.monotonic()
        try:
            values = self._runner.run(staged)
        except Exception as error:
            self._stats.failed_passes += 1
            self._run_apart(list(staged.packed.shares), error)
            return
        self._finish_pass(staged, values, started, time.monotonic())

    def _run_apart(self, shares: list[Share], error: Exception) -> None:
        """A pass failed: the plans of a shared one run again each alone, so that only the one at fault fails."""
        keys = list(dict.fromkeys(share.key for share in shares))
        if len(keys) == 1:
            self._fail(keys[0], error)
            return
        log.warning("a pass of %d requests failed (%s): each is run again alone", len(keys), type(error).__name__)
        for key in keys:
            try:
                staged = self._runner.stage(build_pass([share for share in shares if share.key == key]))
                started = time.monotonic()
                values = self._runner.run(staged)
            except Exception as own_error:
                self._fail(key, own_error)
            else:
                self._finish_pass(staged, values, started, time.monotonic())

    def _finish_pass(self, staged: StagedPass, values: F32, started: float, ended: float) -> None:
        packed = staged.packed
        pass_tokens = len(packed.tokens)
        self._stats.ran(pass_tokens, staged.padded_tokens, ended - started)
        tokens: Counter[Hashable] = Counter()
        for i, share in enumerate(packed.shares):
            entries = slice(int(packed.share_entries[i]), int(packed.share_entries[i + 1]))
            self._tickets[share.key].logprobs[packed.targets[entries]] = values[entries]
            tokens[share.key] += share.piece.tokens
            if share.piece.last == share.plan.job_offsets[share.piece.job + 1]:
                self._runner.free_job(share.key, share.piece.job)
        for key, count in tokens.items():
            self._tickets[key].ran(started, ended, count, pass_tokens)
            if key not in self._scheduler and all(share.key != key for share in self._next_shares):
                self._complete(key)

    def _drop(self, key: Hashable) -> None:
        """Forget what a plan still has to run and free what it holds."""
        if self._next is not None:
            wait([self._next])  # it may be making stores for the plan
        self._scheduler.remove(key)
        self._runner.free(key)

    def _complete(self, key: Hashable) -> None:
        ticket = self._tickets.pop(key)
        self._runner.free(key)
        self._done.append(Completion(key, result=ticket.result(self.info.fingerprint)))

    def _fail(self, key: Hashable, error: Exception) -> None:
        """End one plan with an error; everything that it holds is freed."""
        self._tickets.pop(key)
        self._drop(key)
        self._done.append(Completion(key, error=_request_error(error)))


def _request_error(error: Exception) -> RequestError:
    """What the caller is told: the request is too large for the memory, or an error without its details."""
    if is_out_of_memory(error):
        log.error("a request did not fit the memory: %s", error)
        return RequestError("request_too_large", "the request did not fit the engine's memory")
    log.error("a request failed in the engine", exc_info=error)
    return RequestError("engine_error", "the engine failed on this request")


def is_out_of_memory(error: Exception) -> bool:
    """Python's, CUDA's and the CPU allocator's ways to say that memory is short."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "allocate memory" in str(error)
    )


def _scheme(config: EngineConfig) -> str:
    """The scheme that `config.quant` stands for on this device."""
    if config.device != "cpu":
        raise LoadError(f"device {config.device!r} is not supported by this version: only cpu is")
    scheme = "f32" if config.quant == "auto" else config.quant
    if scheme not in _DTYPES:
        raise LoadError(f"scheme {scheme!r} is not supported on cpu by this version: only {', '.join(_DTYPES)} are")
    return scheme


def _percent_reporter(report: Report | None) -> Callable[[int, int], None] | None:
    """Byte counts as lines for a person, one per ten percent."""
    if report is None:
        return None
    last = -1

    def loaded(done: int, total: int) -> None:
        nonlocal last
        tenth = 10 * done // total
        if tenth != last:
            last = tenth
            report(f"loading weights: {10 * tenth} % of {total / 1e6:.0f} MB")

    return loaded


def _versions() -> dict[str, str | None]:
    return {
        "spinf_serve": __version__,
        "torch": torch.__version__,
        "cuda": None,
        "transformers": _installed("transformers"),
        "python": platform.python_version(),
    }


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
