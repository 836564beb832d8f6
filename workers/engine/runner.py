"""Stages a packed pass as tensors and runs it. Staging may happen in another thread than running."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from spinf_serve.plan import F32
from workers.engine.kernels.products import RowRule
from workers.engine.kernels.tree_attention import prepare
from workers.engine.layers.forward import Capture, Forward, KVStore
from workers.engine.models import GemmaModel
from workers.engine.packing import PackedPass

StoreKey = tuple[Hashable, int]
"""(request key, job)."""


@dataclass(frozen=True, slots=True)
class StagedPass:
    """A pass ready to run: T rows, padding included."""

    packed: PackedPass
    forward: Forward
    entry_rows: Tensor
    entry_cols: Tensor

    @property
    def padded_tokens(self) -> int:
        """Rows that the pass computes, padding included."""
        return self.forward.tokens.shape[0]


def _padded(values: np.ndarray, rows: int) -> Tensor:
    """values [n] → int64 [rows], zeros at the end."""
    out = torch.zeros(rows, dtype=torch.int64)
    out[: len(values)] = torch.from_numpy(values)
    return out


class RunnerBase:
    """The model and the stored contents of unfinished jobs."""

    rows_first: ClassVar[bool]
    """How stores lie, see `KVStore`."""

    def __init__(self, model: GemmaModel, rule: RowRule) -> None:
        self.model, self.rule = model, rule
        self.stores: dict[StoreKey, KVStore] = {}

    def make_stores(self, packed: PackedPass) -> tuple[Capture, ...]:
        """Memory for the contents that the pass is to keep."""
        captures = []
        for content in packed.captures:
            store = KVStore(self.model.kv_shapes(), content.length, self.model.head_weight, rows_first=self.rows_first)
            self.stores[content.key, content.job] = store
            captures.append(Capture(store, content.start))
        return tuple(captures)

    def free(self, key: Hashable) -> None:
        """Drop every stored content of a request."""
        for store in [store for store in self.stores if store[0] == key]:
            del self.stores[store]

    def free_job(self, key: Hashable, job: int) -> None:
        """Drop one job's content, if it is stored."""
        self.stores.pop((key, job), None)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all stored contents."""
        return sum(store.num_bytes for store in self.stores.values())

    def close(self) -> None:
        """Drop the stores and the model's tensors."""
        self.stores.clear()
        self.model.to_empty(device="meta")


class Runner(RunnerBase):
    """Runs passes on the CPU, one at a time."""

    rows_first = False

    def stage(self, packed: PackedPass) -> StagedPass:
        """Index tensors, attention plan, and memory for the contents that the pass is to keep."""
        rows = self.rule.padded(len(packed.tokens))
        layouts = self.model.windows()
        windows: dict[int, set[int | None]] = {}
        for layout, of_layout in layouts.items():
            windows.setdefault(layout.group, set()).update(of_layout)
        plans = {
            group: prepare(packed.segments, rows=rows, group=group, windows=tuple(of_group), rule=self.rule)
            for group, of_group in windows.items()
        }
        captures = self.make_stores(packed)
        forward = Forward(
            tokens=_padded(packed.tokens, rows),
            positions=_padded(packed.positions, rows),
            read_rows=_padded(packed.read_rows, self.rule.padded(len(packed.read_rows))),
            attention={layout: plans[layout.group] for layout in layouts},
            stores=tuple(self.stores[key] for key in packed.stores),
            captures=captures,
            rule=self.rule,
        )
        entry_cols = torch.from_numpy(packed.entry_cols.astype(np.int64))
        return StagedPass(packed, forward, torch.from_numpy(packed.entry_rows), entry_cols)

    def run(self, staged: StagedPass) -> F32:
        """One forward pass → log P of every entry [C]."""
        out: F32 = self.model.logprobs(staged.forward, staged.entry_rows, staged.entry_cols).numpy()
        return out
