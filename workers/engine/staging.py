"""Arrays of a pass in one pinned buffer: one copy takes them all to the device, while the pass before still runs."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_ALIGN = 128  # bytes; kernels may assume 16

_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int8): torch.int8,
    np.dtype(np.float32): torch.float32,
}


@dataclass(frozen=True, slots=True)
class Slot:
    """Where an array lies in the buffer."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int


class HostBuffer:
    """Collects arrays; `pack` lays them into pinned memory."""

    def __init__(self) -> None:
        self._arrays: list[tuple[Slot, np.ndarray]] = []
        self.num_bytes = 0

    def add(self, array: np.ndarray) -> Slot:
        """Take an array along; it must not change until `pack`."""
        slot = Slot(self.num_bytes, array.shape, _DTYPES[array.dtype], array.nbytes)
        self._arrays.append((slot, array))
        self.num_bytes += -(-max(1, array.nbytes) // _ALIGN) * _ALIGN
        return slot

    def pack(self, *, pinned: bool) -> Tensor:
        """[num_bytes] uint8 with every array at its slot."""
        out = torch.empty(self.num_bytes, dtype=torch.uint8, pin_memory=pinned)
        view = out.numpy()
        for slot, array in self._arrays:
            view[slot.offset : slot.offset + slot.num_bytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return out


class DeviceBuffer:
    """A packed buffer on the device."""

    def __init__(self, host: Tensor, device: torch.device) -> None:
        """Queues the copy on the current stream; `host` must live until it is done."""
        self._bytes = host.to(device, non_blocking=True)

    def get(self, slot: Slot) -> Tensor:
        """The array as a tensor of the device."""
        return self._bytes[slot.offset : slot.offset + slot.num_bytes].view(slot.dtype).view(slot.shape)
