"""Unpacking a tarball that nobody vouches for: plain files inside one folder, within limits, or nothing."""

import re
import tarfile
import zlib
from pathlib import Path, PurePosixPath
from typing import IO

from spinf_serve.packs.sources import SourceError

MAX_EXPANDED_BYTES = 256 << 20
MAX_ENTRIES = 20_000
"""Files and folders, those that are only part of a path too."""
MAX_PATH_CHARS = 1024
MAX_DEPTH = 64
_CHUNK = 1 << 16
_GZIP = 31  # zlib's `wbits`
_END = 1024  # bytes: a tar ends with two blocks of zeros
_DRIVE = re.compile(r"[A-Za-z]:")


class _Expanded:
    """The tar stream inside a gzip file, cut at a number of bytes: headers count too, so no header can be a bomb."""

    def __init__(self, file: IO[bytes], max_bytes: int) -> None:
        self._file, self._left, self._max = file, max_bytes, max_bytes
        self._written = 0  # bytes up to the last one that is not zero
        self._inflater = zlib.decompressobj(_GZIP)

    def read(self, size: int) -> bytes:
        """Up to `size` bytes; fewer only at the end of the stream."""
        parts, wanted = [], size
        while wanted > 0:
            part = self._some(wanted)
            if not part:
                break
            parts.append(part)
            wanted -= len(part)
        return b"".join(parts)

    def _some(self, size: int) -> bytes:
        while not self._inflater.eof:
            data = self._inflater.unconsumed_tail or self._file.read(_CHUNK)
            if not data:
                raise SourceError("the tarball is cut off")
            part = self._inflater.decompress(data, size)
            self._left -= len(part)
            if self._left < 0:
                raise SourceError(f"the tarball expands to more than {self._max >> 20} MiB")
            if part:
                if content := part.rstrip(b"\0"):
                    self._written = self._max - self._left - len(part) + len(content)
                return part
        return b""

    def finish(self, end: int) -> None:
        """Reads to the end, where gzip's checksum is; the tar's entries end at `end`, and only zeros may follow.

        Python's reader takes a damaged header for the end, and needs no end at all.
        """
        while self._some(_CHUNK):
            pass
        if self._written > end or self._inflater.unused_data.strip(b"\0") or self._file.read(_CHUNK).strip(b"\0"):
            raise SourceError("the tarball is damaged: it goes on after its end")
        if self._max - self._left < end + _END:
            raise SourceError("the tarball is cut off")


def extract(file: IO[bytes], target: Path, *, max_bytes: int = MAX_EXPANDED_BYTES) -> None:
    """Unpacks a gzip tarball into the new folder `target`, without the one top folder that GitHub puts around it.

    Raises `SourceError` at the first entry that is not a plain file or folder below that top folder, and for limits.
    The caller removes `target` then.
    """
    target.mkdir()
    stream = _Expanded(file, max_bytes)
    seen: set[PurePosixPath] = set()
    top: str | None = None
    try:
        with tarfile.open(fileobj=stream, mode="r|", errorlevel=2) as tar:  # type: ignore[call-overload]
            for count, member in enumerate(tar, 1):
                path = inner_path(member.name)
                seen.update((path, *path.parents[:-1]))
                if max(count, len(seen)) > MAX_ENTRIES:
                    raise SourceError(f"the tarball holds more than {MAX_ENTRIES} entries")
                top = path.parts[0] if top is None else top
                _place(tar, member, path, target, top)
            end = tar.offset
        stream.finish(end)
    except SourceError:
        raise
    # The reader raises ValueError and its like for numbers of a header that are none.
    except (tarfile.TarError, zlib.error, EOFError, ValueError, ArithmeticError, LookupError) as error:
        raise SourceError(f"the tarball is damaged: {error}") from None
    except OSError as error:
        raise SourceError(f"the tarball cannot be unpacked: {error.strerror or error}") from None
    if not seen:
        raise SourceError("the tarball is empty")


def _place(tar: tarfile.TarFile, member: tarfile.TarInfo, path: PurePosixPath, target: Path, top: str) -> None:
    if not (member.isdir() or member.isreg()) or member.issparse():
        raise SourceError(
            f"the tarball holds {_shown(member.name)}, which is no plain file: links and devices are refused"
        )
    first, *inner = path.parts
    if first != top or not (inner or member.isdir()):
        raise SourceError(f"the tarball holds {_shown(member.name)} beside its top folder")
    if not inner:
        return
    place = target.joinpath(*inner)
    if member.isdir():
        place.mkdir(parents=True, exist_ok=True)
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    source = tar.extractfile(member)
    assert source is not None
    # "x": a second entry of one name, on whatever file system, is an error rather than a replacement.
    with place.open("xb") as out:
        while chunk := source.read(_CHUNK):
            out.write(chunk)
        if out.tell() != member.size:
            raise SourceError("the tarball is cut off")


def inner_path(name: str) -> PurePosixPath:
    """A tar name as a relative path. Raises `SourceError` for one that is absolute, escapes or is no name elsewhere."""
    path = PurePosixPath(name)
    bad = path.is_absolute() or ".." in path.parts or not path.parts or "\\" in name or "\0" in name
    bad = bad or len(path.parts) > MAX_DEPTH
    if bad or _DRIVE.match(name) or len(name) > MAX_PATH_CHARS or any("\ud800" <= c <= "\udfff" for c in name):
        raise SourceError(f"the tarball holds a path that is not allowed: {_shown(name)}")
    return path


def _shown(name: str) -> str:
    return ascii(name[:100])
