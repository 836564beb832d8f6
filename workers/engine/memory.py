"""Memory of the device: the figures for logs and metrics, and whether a failed pass gave back what it held."""

import gc
import logging
import traceback
from dataclasses import dataclass
from typing import Protocol

import torch

log = logging.getLogger(__name__)

LEAK = 1 << 30
"""Bytes over the idle level that mark the engine degraded."""

OWN = 1 << 30
"""Bytes that a process may take from a device beside its tensors: the context, kernels, the libraries' own."""


class Allocator(Protocol):
    """What is asked of a device and its allocator, in bytes."""

    def use(self) -> None:
        """Make the device the calling thread's: each thread starts with the first one."""

    def allocated(self) -> int:
        """Held by tensors now."""

    def peak(self) -> int:
        """The most that tensors held at once since `reset_peak`."""

    def reset_peak(self) -> None:
        """Count the peak from now on."""

    def reserved(self) -> int:
        """Taken from the device, tensors and the allocator's own cache."""

    def elsewhere(self) -> int:
        """Neither free nor reserved here: this process's context, and all that other processes took."""

    def release(self) -> None:
        """Give back what no tensor holds."""

    def works(self) -> bool:
        """Whether the device still answers: a fault of a kernel stops it for the rest of the process."""


class CudaAllocator:
    """torch's allocator of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def use(self) -> None:
        torch.cuda.set_device(self._device)

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def reserved(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def elsewhere(self) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free - self.reserved()

    def release(self) -> None:
        torch.cuda.empty_cache()

    def works(self) -> bool:
        try:
            torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            log.error("the GPU does not answer any more: %s", error)
            return False
        return True


@dataclass(slots=True)
class Memory:
    """What tensors held, in bytes.

    before   when the load begins
    weights  what the loaded model added to that
    idle     after the warm-up, when nothing runs and nothing is stored
    """

    allocator: Allocator
    before: int = 0
    weights: int = 0
    idle: int = 0

    def loading(self) -> None:
        """The load begins."""
        self.before = self.allocator.allocated()

    def loaded(self) -> None:
        """The model is in place and nothing else."""
        self.idle = self.allocator.allocated()
        self.weights = self.idle - self.before

    def warmed_up(self) -> None:
        """The idle level is what tensors hold now. The allocator keeps its cache: the first requests find it warm."""
        gc.collect()
        self.idle = self.allocator.allocated()

    def release(self) -> None:
        """Collect what only cycles hold, then give unused memory back to the device."""
        gc.collect()
        self.allocator.release()

    def others(self) -> int:
        """What other processes hold at least: 0 where all that is gone may be this one's."""
        elsewhere = self.allocator.elsewhere()
        return elsewhere if elsewhere > OWN else 0

    def leaked(self, stored: int) -> str | None:
        """Why the memory counts as leaking, when no pass runs and `stored` bytes of contents are kept; None = fine."""
        self.release()
        left = self.allocator.allocated() - stored - self.idle
        log.info("memory after a pass that did not fit: %s over the idle level", _mib(max(0, left)))
        if left <= LEAK:
            return None
        return f"{_mib(left)} of GPU memory were not given back after a request that did not fit"

    def figures(self) -> dict[str, int]:
        """Bytes: all that the engine took from the device, the weights, and the most held at once."""
        allocator = self.allocator
        return {"memory_bytes": allocator.reserved(), "weights_bytes": self.weights, "peak_bytes": allocator.peak()}

    def summary(self) -> str:
        """The figures in words."""
        pass_bytes = self.allocator.peak() - self.before - self.weights
        return (
            f"memory: weights {_mib(self.weights)}, a pass up to {_mib(pass_bytes)} more, "
            f"reserved {_mib(self.allocator.reserved())}"
        )


def forget_frames(error: BaseException) -> None:
    """Drop the tensors that an exception's frames still hold, those of the exceptions behind it too."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        current = waiting.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        traceback.clear_frames(current.__traceback__)
        current.__traceback__ = None
        waiting += [current.__cause__, current.__context__]


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"
