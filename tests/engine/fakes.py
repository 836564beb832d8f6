"""A device without a device: a runner that notes the order of its calls, and an allocator that only counts."""

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from spinf_serve.plan import F32, EngineInfo
from tests.engine.support import engine_config
from workers.engine.clock import Clock
from workers.engine.engine import ScoringEngine
from workers.engine.memory import Memory
from workers.engine.packing import PackedPass

Fault = Callable[["FakeStaged"], Exception | None]


@dataclass(frozen=True)
class FakeStaged:
    """A pass with a number of its own, counted from 0 in the order of staging."""

    number: int
    packed: PackedPass

    @property
    def padded_tokens(self) -> int:
        return len(self.packed.tokens)

    @property
    def keys(self) -> set[Hashable]:
        return {share.key for share in self.packed.shares}


@dataclass
class FakePending:
    """Done after `polls` looks, or at once when it is waited for."""

    runner: "FakeRunner"
    staged: FakeStaged
    polls: int

    def done(self) -> bool:
        self.polls -= 1
        return self.polls < 0

    def wait(self) -> F32:
        self.runner.note("wait", self.staged)
        if error := self.runner.wait_fault(self.staged):
            raise error
        return self.staged.packed.entry_cols.astype(np.float32)


@dataclass
class FakeRunner:
    """The value of an entry is its column. `events`: ("stage" | "launch" | "wait", number), ("free", key)."""

    polls: int = 3
    events: list[tuple[str, Any]] = field(default_factory=list)
    staged: list[FakeStaged] = field(default_factory=list)
    stored: dict[tuple[Hashable, int], int] = field(default_factory=dict)
    stage_fault: Callable[[PackedPass], Exception | None] = lambda packed: None
    launch_fault: Fault = lambda staged: None
    wait_fault: Fault = lambda staged: None

    def note(self, what: str, staged: FakeStaged) -> None:
        self.events.append((what, staged.number))

    def stage(self, packed: PackedPass) -> FakeStaged:
        if error := self.stage_fault(packed):
            raise error
        staged = FakeStaged(len(self.staged), packed)
        self.staged.append(staged)
        self.note("stage", staged)
        assert all(key in self.stored for key in packed.stores), "a store was freed under a pass to come"
        self.stored |= {(content.key, content.job): content.length for content in packed.captures}
        return staged

    def launch(self, staged: FakeStaged) -> FakePending:
        if error := self.launch_fault(staged):
            raise error
        self.note("launch", staged)
        return FakePending(self, staged, self.polls)

    def run(self, staged: FakeStaged) -> F32:
        return self.launch(staged).wait()

    def free(self, key: Hashable) -> None:
        self.events.append(("free", key))
        self.stored = {store: size for store, size in self.stored.items() if store[0] != key}

    def free_job(self, key: Hashable, job: int) -> None:
        self.stored.pop((key, job), None)

    @property
    def stored_bytes(self) -> int:
        return sum(self.stored.values())

    def close(self) -> None:
        self.events.append(("close", None))

    def order(self, *kinds: str) -> list[tuple[str, Any]]:
        """The events of these kinds."""
        return [event for event in self.events if event[0] in kinds]


@dataclass
class FakeAllocator:
    """`held`: bytes of tensors; `foreign`: of other processes."""

    held: int = 0
    foreign: int = 0
    most: int = 0
    cached: int = 0
    alive: bool = True
    releases: int = 0
    threads: set[int] = field(default_factory=set)

    def use(self) -> None:
        self.threads.add(threading.get_ident())

    def allocated(self) -> int:
        return self.held

    def peak(self) -> int:
        return max(self.most, self.held)

    def reset_peak(self) -> None:
        self.most = self.held

    def reserved(self) -> int:
        return self.held + self.cached

    def elsewhere(self) -> int:
        return self.foreign

    def release(self) -> None:
        self.cached, self.releases = 0, self.releases + 1

    def works(self) -> bool:
        return self.alive


def fake_engine(
    runner: FakeRunner,
    memory: FakeAllocator | None = None,
    *,
    invariant: bool = True,
    clock: Clock | None = None,
    **settings: Any,
) -> ScoringEngine:
    """An engine on a fake device, passes of 100 tokens."""
    config = engine_config(Path("nowhere"), **{"device": "cuda:0", "token_budget": 100, "max_tokens": 300, **settings})
    info = EngineInfo("fp_0", "fp8s" if invariant else "fp8", invariant, "fake", "9.0", 100, 300, 800)
    held = None if memory is None else Memory(memory)
    if held is not None:
        held.loaded()
    return ScoringEngine(config, runner, info, memory=held, window=16, clock=clock)
