"""Writes a safetensors file of known names, types and shapes, each tensor block by block, in any order."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from workers.engine.shards import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor to be written. dtype: the format's name of its type."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its data."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize


class ShardWriter:
    """A context manager; the file is complete and on the disk when it ends without an error.

    Data lie by falling size of the type, then by name, as the format's own writer puts them: every tensor is aligned.
    """

    def __init__(self, path: Path, entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> None:
        order = sorted(entries, key=lambda name: (-DTYPES[entries[name].dtype].itemsize, name))
        header: dict[str, object] = {"__metadata__": dict(metadata)}
        end = 0
        for name in order:
            entry = entries[name]
            begin, end = end, end + entry.num_bytes
            header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self._entries = dict(entries)
        self._begin = {name: 8 + len(text) + header[name]["data_offsets"][0] for name in order}  # type: ignore[index]
        self._written = dict.fromkeys(order, 0)
        self._file = path.open("xb")
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.flush()
        os.truncate(self._file.fileno(), 8 + len(text) + end)

    def write(self, name: str, rows: Tensor) -> None:
        """Append rows to a tensor's data. ValueError for another type, or for more than the tensor has."""
        entry = self._entries[name]
        if _NAMES[rows.dtype] != entry.dtype:
            raise ValueError(f"{name} is to be {entry.dtype}, not {_NAMES[rows.dtype]}")
        data = rows.contiguous().reshape(-1).view(torch.uint8).numpy()
        if self._written[name] + data.nbytes > entry.num_bytes:
            raise ValueError(f"{name} has more rows than its shape {list(entry.shape)}")
        os.lseek(self._file.fileno(), self._begin[name] + self._written[name], os.SEEK_SET)
        view = memoryview(data)
        while view:
            view = view[os.write(self._file.fileno(), view) :]
        self._written[name] += data.nbytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                short = [name for name, entry in self._entries.items() if self._written[name] < entry.num_bytes]
                if short:
                    raise ValueError(f"{min(short)} was not written whole")
                os.fsync(self._file.fileno())
        finally:
            self._file.close()
