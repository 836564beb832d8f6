"""Stages packed passes and runs them on a GPU. Staging may happen in another thread than launching."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spinf_serve.plan import F32
from workers.engine.kernels.products import RowRule
from workers.engine.kernels.tree_attention.kernel import HostPlan, Layout, on_device, stage
from workers.engine.layers.forward import Capture, Forward, KVStore
from workers.engine.models import GemmaModel
from workers.engine.packing import PackedPass
from workers.engine.runner import RunnerBase
from workers.engine.staging import DeviceBuffer, HostBuffer, Slot


@dataclass(frozen=True, slots=True)
class CudaStagedPass:
    """A pass whose arrays lie in pinned memory: T rows, padding included."""

    packed: PackedPass
    padded_tokens: int
    host: Tensor
    slots: Mapping[str, Slot]
    plans: Mapping[Layout, HostPlan]
    stores: tuple[KVStore, ...]
    captures: tuple[Capture, ...]


@dataclass(frozen=True, slots=True)
class CudaPendingPass:
    """A launched pass: its values arrive in pinned memory. `held` is read by the device until they have."""

    values: Tensor
    event: torch.cuda.Event
    held: CudaStagedPass

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> F32:
        """log P of every entry [C]."""
        self.event.synchronize()
        out: F32 = self.values.numpy()
        return out


class CudaRunner(RunnerBase):
    """Runs passes on one GPU, in the order of their launch."""

    rows_first = True

    def __init__(self, model: GemmaModel, rule: RowRule) -> None:
        super().__init__(model, rule)
        self.device = model.head_weight.device
        self._layouts = tuple(model.windows())
        self._windows: dict[Layout, tuple[int | None, ...]] = {}
        for layout, windows in model.windows().items():
            key = layout.group, layout.head_dim
            self._windows[key] = (*self._windows.get(key, ()), *windows)

    def stage(self, packed: PackedPass) -> CudaStagedPass:
        """Index arrays and attention plans in pinned memory, and device memory for the contents that are kept."""
        rows = self.rule.padded(len(packed.tokens))
        buffer = HostBuffer()
        stores = tuple(self.stores[key] for key in packed.stores)
        plans = stage(
            packed.segments, buffer, self._windows, rows=rows, store_lengths=[store.length for store in stores]
        )
        arrays = {
            "tokens": _padded(packed.tokens, rows),
            "positions": _padded(packed.positions, rows),
            "read_rows": packed.read_rows,
            "entry_rows": packed.entry_rows,
            "entry_cols": packed.entry_cols.astype(np.int64),
        }
        slots = {name: buffer.add(array) for name, array in arrays.items()}
        captures = self.make_stores(packed)
        host = buffer.pack(pinned=self.device.type == "cuda")
        return CudaStagedPass(packed, rows, host, slots, plans, stores, captures)

    @torch.inference_mode()
    def forward(self, staged: CudaStagedPass) -> Tensor:
        """Queue the pass on the device's stream → log P of every entry [C], on the device."""
        buffer = DeviceBuffer(staged.host, self.device)
        arrays = {name: buffer.get(slot) for name, slot in staged.slots.items()}
        plans = {layout: on_device(plan, buffer) for layout, plan in staged.plans.items()}
        forward = Forward(
            tokens=arrays["tokens"],
            positions=arrays["positions"],
            read_rows=arrays["read_rows"],
            attention={layout: plans[layout.group, layout.head_dim] for layout in self._layouts},
            stores=staged.stores,
            captures=staged.captures,
            rule=self.rule,
        )
        return self.model.logprobs(forward, arrays["entry_rows"], arrays["entry_cols"])

    def launch(self, staged: CudaStagedPass) -> CudaPendingPass:
        """Queue the pass and return: passes run in the order of their launch."""
        values = self.forward(staged)
        out = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        out.copy_(values, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return CudaPendingPass(out, event, staged)

    def run(self, staged: CudaStagedPass) -> F32:
        """One forward pass → log P of every entry [C]."""
        return self.launch(staged).wait()


def _padded(values: np.ndarray, rows: int) -> np.ndarray:
    """values [n] → int64 [rows], zeros at the end."""
    out = np.zeros(rows, dtype=np.int64)
    out[: len(values)] = values
    return out
