"""Safetensors files read in blocks of rows through one buffer: nothing is mapped, and no tensor is held whole.

Format: 8 bytes header length (little endian), a JSON header {name: {dtype, shape, data_offsets}}, the data. Offsets
count from the end of the header.
"""

import math
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from spinf_serve.completeness import first_astray
from spinf_serve.jsonfile import parse
from workers.engine.errors import LoadError

INDEX = "model.safetensors.index.json"
BLOCK_BYTES = 32 << 20
_MAX_HEADER = 100 << 20  # the format's own bound

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The format's names of the types that may be read. A tensor of another type may lie in a file, unread."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file: what the header says, and its bytes in blocks.

    dtype   the format's name of its type, see `DTYPES`
    offset  where its data begin in the file
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    shard: "Shard"

    @property
    def torch_dtype(self) -> torch.dtype:
        """LoadError for a type that torch has no name for here."""
        try:
            return DTYPES[self.dtype]
        except KeyError:
            raise LoadError(f"weight {self.name} has type {self.dtype}, which is not supported") from None

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """(first row, rows [n, ...]) in order; a scalar is one row without dimensions.

        The rows lie in a buffer of the snapshot's and are overwritten by the next block of any tensor.
        """
        dtype = self.torch_dtype
        rows, tail = (self.shape[0], self.shape[1:]) if self.shape else (1, ())
        row_bytes = self.num_bytes // rows if rows else 0
        step = max(1, BLOCK_BYTES // row_bytes) if row_bytes else rows
        for first in range(0, rows, max(1, step)):
            count = min(step, rows - first)
            raw = self.shard.read(self.offset + first * row_bytes, count * row_bytes)
            yield first, raw.view(dtype).view((count, *tail) if self.shape else ())
        self.shard.drop(self.offset, self.num_bytes)

    def read(self) -> Tensor:
        """A copy of the whole tensor, in its own type."""
        out = torch.empty(self.shape, dtype=self.torch_dtype)
        for first, rows in self.blocks():
            if self.shape:
                out[first : first + len(rows)] = rows
            else:
                out.copy_(rows)
        return out


class Shard:
    """One open file. `drop_pages`: what was read leaves the page cache again."""

    def __init__(self, path: Path, *, drop_pages: bool = False) -> None:
        self.path, self._drop_pages = path, drop_pages
        self._buffer = torch.empty(0, dtype=torch.uint8)
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise LoadError(f"{path} cannot be read: {error.strerror or error}") from None
        try:
            self.tensors = {tensor.name: tensor for tensor in self._read_header()}
        except BaseException:
            self.close()
            raise

    def _read_header(self) -> Iterator[StoredTensor]:
        size = os.fstat(self._fd).st_size
        length = int.from_bytes(os.pread(self._fd, 8, 0), "little")
        if not 2 <= length <= min(size - 8, _MAX_HEADER):
            raise LoadError(f"{self.path} is cut off or not a safetensors file")
        try:
            header = parse(os.pread(self._fd, length, 8), unique=True)
            header.pop("__metadata__", None)
            for name, entry in header.items():
                yield self._tensor(name, entry, 8 + length, size)
            astray = first_astray((name, tuple(entry["data_offsets"])) for name, entry in header.items())
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            raise LoadError(f"{self.path} cannot be read: bad header ({error!r})") from None
        if astray is not None:
            raise LoadError(f"{self.path} is damaged: the data of weight {astray} do not follow those before them")

    def _tensor(self, name: str, entry: dict[str, Any], data: int, size: int) -> StoredTensor:
        begin, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        if not isinstance(entry["dtype"], str) or not all(type(n) is int for n in (*shape, begin, end)):
            raise TypeError(f"weight {name} has an entry of other types")
        if min(*shape, begin, end) < 0 or not begin <= end <= size - data:
            raise LoadError(f"{self.path} is cut off: weight {name} lies outside the file")
        dtype = DTYPES.get(entry["dtype"])
        if dtype is not None and math.prod(shape) * dtype.itemsize != end - begin:
            raise LoadError(f"{self.path} is damaged: weight {name} {list(shape)} has {end - begin} bytes")
        return StoredTensor(name, entry["dtype"], shape, data + begin, end - begin, self)

    def read(self, offset: int, count: int) -> Tensor:
        """[count] uint8 in the shard's buffer."""
        if len(self._buffer) < count:
            self._buffer = torch.empty(max(count, min(BLOCK_BYTES, 2 * count)), dtype=torch.uint8)
        view = memoryview(self._buffer.numpy())[:count]
        done = 0
        while done < count:
            try:
                got = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as error:
                raise LoadError(f"{self.path} cannot be read: {error.strerror or error}") from None
            if got == 0:
                raise LoadError(f"{self.path} is cut off: it ends {count - done} bytes early")
            done += got
        return self._buffer[:count]

    def drop(self, offset: int, count: int) -> None:
        """Let the pages of these bytes go, where the snapshot is larger than the page cache should hold."""
        if self._drop_pages and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, offset, count, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the file and let the buffer go."""
        os.close(self._fd)
        self._buffer = torch.empty(0, dtype=torch.uint8)


class Snapshot:
    """The weights of a snapshot directory: `tensors` by stored name, in the order of the files. A context manager."""

    def __init__(self, directory: Path) -> None:
        paths = shard_paths(directory)
        drop = _exceeds_page_cache(paths)
        self.shards: list[Shard] = []
        self.tensors: dict[str, StoredTensor] = {}
        with ExitStack() as opened:
            for path in paths:
                shard = Shard(path, drop_pages=drop)
                opened.callback(shard.close)
                self.shards.append(shard)
                if twice := self.tensors.keys() & shard.tensors.keys():
                    raise LoadError(f"weight {min(twice)} is stored twice: the second time in {path}")
                self.tensors |= shard.tensors
            self._opened = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()


def shard_paths(snapshot_dir: Path) -> list[Path]:
    """The weight files: those of the index where there is one, else `model.safetensors`. LoadError for one missing."""
    index = snapshot_dir / INDEX
    if not index.exists():
        names = ["model.safetensors"]
    else:
        try:
            names = sorted(set(parse(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise LoadError(f"{index} cannot be read: {error!r}") from None
    for name in names:
        if not (snapshot_dir / name).is_file():
            raise LoadError(f"{snapshot_dir} has no {name}")
    return [snapshot_dir / name for name in names]


def _exceeds_page_cache(paths: list[Path]) -> bool:
    """Whether these files would push out most of what the machine caches: over half of the available memory.

    Smaller snapshots stay in the page cache, from which a restarted engine reads them again.
    """
    try:
        meminfo = Path("/proc/meminfo").read_text(encoding="ascii")
        available = next(int(line.split()[1]) << 10 for line in meminfo.splitlines() if line.startswith("MemAvailable"))
    except (OSError, ValueError, StopIteration):
        return True
    return sum(path.stat().st_size for path in paths) > available // 2
