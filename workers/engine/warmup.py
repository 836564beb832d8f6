"""The passes that run before an engine is ready: on a GPU each kind that a request can need, on the CPU a short one.

Kernels are compiled for what the model and the scheme fix, never for how long a pass is. Every *kind* of pass is here
all the same, so that nothing is left for a request to pay: compilations, the libraries' own first calls, memory.
"""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from spinf_serve.config import EngineConfig
from spinf_serve.plan import ScorePlan
from workers.engine.compiles import CompileCounter
from workers.engine.device import compilation_refusal
from workers.engine.errors import LoadError, NotNow
from workers.engine.failures import is_out_of_memory, is_unwritable
from workers.engine.memory import Memory, forget_frames
from workers.engine.packing import Share, build_pass
from workers.engine.pipeline import AnyRunner, launch
from workers.engine.scheduler import Scheduler

log = logging.getLogger(__name__)

_SHORT = 256
_BRANCH = 12  # tokens: a common question's length
_CONTENT = 512  # tokens: a common content's length
_BRANCHES = 32
KEY = "warm-up"


@dataclass(frozen=True, slots=True)
class WarmupPass:
    """One plan and the budget by which it is cut into passes. `optional`: it may not fit the memory."""

    name: str
    plan: ScorePlan
    budget: int
    optional: bool = False


def warmup_plan(contents: list[int], branches: int, branch: int = _BRANCH) -> ScorePlan:
    """Jobs of these contents (tokens), each with `branches` questions of `branch` tokens, whose last ones are read.

    Without branches the content's last token is read.
    """
    tokens = [content + branches * branch for content in contents]
    offsets = np.concatenate(([0], np.cumsum(tokens))).astype(np.int64)
    parents = np.arange(offsets[-1], dtype=np.int32) - 1
    reads: list[int] = []
    for start, content in zip(offsets[:-1].tolist(), contents, strict=True):
        parents[start] = -1
        heads = start + content + branch * np.arange(branches)
        parents[heads] = start + content - 1
        reads += (heads + branch - 1).tolist() if branches else [start + content - 1]
    return ScorePlan(
        tokens=np.zeros(int(offsets[-1]), dtype=np.int32),
        parents=parents,
        job_offsets=offsets,
        prefix_lens=np.array(contents, dtype=np.int32),
        read_rows=np.array(reads, dtype=np.int32),
        col_offsets=np.arange(len(reads) + 1, dtype=np.int64),
        cols=np.zeros(len(reads), dtype=np.int32),
    )


@dataclass(frozen=True, slots=True)
class _Lengths:
    """Of common requests, in tokens, and within what a request may have where that is less: 1 and 1 at least."""

    branch: int
    content: int

    @classmethod
    def of(cls, config: EngineConfig) -> "_Lengths":
        branch = min(_BRANCH, config.max_tokens - 1)
        return cls(branch, min(_CONTENT, config.max_tokens - branch))


def short_pass(config: EngineConfig) -> WarmupPass:
    """Half content, half questions."""
    common = _Lengths.of(config)
    tokens = min(_SHORT, config.token_budget)
    content = min(common.content, max(1, tokens // 2))
    plan = warmup_plan([content], (tokens - content) // common.branch, common.branch)
    return WarmupPass("a short pass", plan, config.token_budget)


def budget_pass(config: EngineConfig) -> WarmupPass:
    """Contents and questions of common lengths, as many as the budget holds."""
    common = _Lengths.of(config)
    jobs = config.token_budget // (common.content + _BRANCHES * common.branch)
    if jobs:
        plan = warmup_plan([common.content] * jobs, _BRANCHES, common.branch)
    else:
        content = min(config.token_budget, config.max_tokens)
        number, rest = divmod(config.token_budget, content)
        plan = warmup_plan([content] * number + [rest] * bool(rest), 0)
    return WarmupPass(f"a pass of {len(plan.tokens)} tokens", plan, config.token_budget)


def warmup_passes(config: EngineConfig, window: int) -> list[WarmupPass]:
    """The list of a GPU for `config.warmup`. The largest runs first, the one most like a request's last.

    window: of the sliding layers, 0 without any
    """
    budget, most = config.token_budget, config.max_tokens
    if config.warmup == "none":
        return []
    if config.warmup == "short":
        return [short_pass(config), budget_pass(config)]
    common = _Lengths.of(config)
    branch = common.branch
    over = min(most, window + _CONTENT)
    split = min(common.content, max(1, budget // 2))
    rows = max(1, min(budget // 2, 4096))
    return [
        WarmupPass("one token", warmup_plan([1], 0), budget),
        short_pass(config),
        WarmupPass(f"the longest input, {most} tokens", warmup_plan([most - 1], 1, 1), budget, optional=most > budget),
        WarmupPass("a content over the window", warmup_plan([over - branch], 1, branch), budget),
        WarmupPass(
            "questions over several passes",
            warmup_plan([split], 3 * (split // branch + 1), branch),
            min(budget, 2 * split),
        ),
        replace(short_pass(config), name="whole prompts", plan=replace(short_pass(config).plan, by_position=True)),
        WarmupPass("many questions of one token", warmup_plan([1] * 8, rows // 8, 1), budget),
        budget_pass(config),
    ]


def warm_up(
    config: EngineConfig,
    runner: AnyRunner,
    window: int,
    memory: Memory | None,
    compiles: CompileCounter | None,
    report: Callable[[str], None] | None,
) -> None:
    """Run the list; on the CPU, where nothing is compiled, one short pass. What was stored is freed."""
    if memory is None:
        passes = [] if config.warmup == "none" else [short_pass(config)]
    else:
        passes = warmup_passes(config, window)
        memory.allocator.reset_peak()
    for number, one in enumerate(passes, start=1):
        line = f"warm-up {number} of {len(passes)}: {one.name}"
        if memory is not None and report is not None:
            report(line)  # before it runs: what compiles for a minute must be seen to move
        started = time.monotonic()
        _run(one, config, runner, memory)
        counted = "" if compiles is None else f", {compiles.compiled} kernels compiled so far"
        log.info("%s: %.2f s%s", line, time.monotonic() - started, counted)
    if memory is not None:
        memory.warmed_up()
        log.info("%s", memory.summary())
    if compiles is not None and config.warmup != "none":  # else the first calls are meant to pay
        compiles.ready()


def _run(one: WarmupPass, config: EngineConfig, runner: AnyRunner, memory: Memory | None) -> None:
    """All passes of one plan. What does not fit the memory is told of where it is `optional`, and else ends the start.

    That is a LoadError only where the pass has failed in a card that nobody else uses; else NotNow.
    """
    if _fits(one, config, runner, memory):
        return
    assert memory is not None
    memory.release()
    if one.optional:
        log.warning("%s does not fit the memory: a request of that size will be refused", one.name)
        return
    if not (others := memory.others()):
        # Who took the memory may have failed in the same moment and be gone. Then the pass fits now.
        if _fits(one, config, runner, memory):
            return
        memory.release()
        others = memory.others()
    if others:
        raise NotNow(f"{one.name} does not fit the GPU's memory now: other processes hold {others / (1 << 30):.1f} GiB")
    raise LoadError(f"{one.name} does not fit the GPU's memory: lower --token-budget")


def _fits(one: WarmupPass, config: EngineConfig, runner: AnyRunner, memory: Memory | None) -> bool:
    """Run all passes of one plan; False where a GPU's memory is short.

    A score that is not finite is a LoadError: no request would get a number from such a model. So is a disk without
    room for a compiled kernel.
    """
    try:
        for shares in _passes(one, config):
            values = launch(runner, runner.stage(build_pass(shares))).pending.wait()
            if not np.isfinite(values).all():
                raise LoadError(
                    f"{one.name} of the warm-up gives scores that are not finite: the weights in "
                    f"{config.model.snapshot_dir} are damaged, or config.json is not theirs"
                )
    except Exception as error:
        if memory is None:
            raise
        if is_unwritable(error):
            raise compilation_refusal(error) from None
        if not is_out_of_memory(error):
            raise
        forget_frames(error)
        return False
    finally:
        runner.free(KEY)
    if memory is not None and one.optional:
        memory.release()
    return True


def _passes(one: WarmupPass, config: EngineConfig) -> Iterator[list[Share]]:
    """The plan's pieces, pass by pass, as the scheduler would cut them for a request alone."""
    scheduler = Scheduler(one.budget, config.max_tokens)
    scheduler.add(KEY, one.plan)
    while len(scheduler):
        yield scheduler.next_pass()
