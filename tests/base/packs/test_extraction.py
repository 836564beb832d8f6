"""Tarballs made to do harm: each is refused, and nothing of it is left."""

import gzip
import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spinf_serve.packs import extraction
from spinf_serve.packs.cache import RepositoryCache
from spinf_serve.packs.extraction import extract
from spinf_serve.packs.sources import SourceError
from tests.base.packs.github_server import SHA, tarball

TOP = "top/"


def packed(*members: tuple[str, bytes, bytes] | tarfile.TarInfo, format: int = tarfile.PAX_FORMAT) -> bytes:
    """A gzip tarball of (name, type, content or link target), after the top folder and one good file."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", format=format) as tar:
        for member in [(TOP, tarfile.DIRTYPE, b""), (TOP + "good.json", tarfile.REGTYPE, b"{}"), *members]:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
                continue
            name, kind, content = member
            info = tarfile.TarInfo(name)
            info.type = kind
            if kind == tarfile.REGTYPE:
                info.size = len(content)
            else:
                info.linkname = content.decode()
            tar.addfile(info, io.BytesIO(content) if kind == tarfile.REGTYPE else None)
    return buffer.getvalue()


def sparse(size: int) -> bytes:
    """A GNU sparse file (PAX 1.0 form) that claims to be larger than what is stored."""
    info = tarfile.TarInfo(TOP + "GNUSparseFile.0/hole")
    info.pax_headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": TOP + "hole",
        "GNU.sparse.realsize": str(size),
    }
    content = b"1\n0\n1\n".ljust(512, b"\0") + b"x"
    info.size = len(content)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def with_headers(headers: dict[str, str]) -> bytes:
    """A file with PAX headers that are no sense."""
    info = tarfile.TarInfo(TOP + "x")
    info.pax_headers = headers
    return packed(info)


def without_header(name: str) -> bytes:
    """A file's header destroyed, so that nothing tells where the entries after it begin."""
    plain = bytearray(gzip.decompress(packed((name, tarfile.REGTYPE, b"x"), (TOP + "last", tarfile.REGTYPE, b"x"))))
    at = plain.index(name.encode())
    plain[at : at + 512] = b"?" * 512
    return gzip.compress(bytes(plain))


def without_end() -> bytes:
    plain = gzip.decompress(packed((TOP + "last", tarfile.REGTYPE, b"x")))
    return gzip.compress(plain.rstrip(b"\0").ljust(-(-len(plain.rstrip(b"\0")) // 512) * 512, b"\0"))


def two_members() -> bytes:
    """One tar in two gzip members: a reader of the first would see half of it."""
    plain = gzip.decompress(packed((TOP + "last", tarfile.REGTYPE, b"x")))
    at = plain.index(b"top/last")
    return gzip.compress(plain[:at]) + gzip.compress(plain[at:])


def absolute() -> bytes:
    """A tarball whose every path is absolute, so that none stands out."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name in ("/etc", "/etc/evil"):
            info = tarfile.TarInfo(name)
            info.type = tarfile.DIRTYPE if name == "/etc" else tarfile.REGTYPE
            tar.addfile(info)
    return buffer.getvalue()


def old_sparse(size: int) -> bytes:
    """The same in the old GNU form: one byte of data, and a header that claims `size`."""
    info = tarfile.TarInfo(TOP + "hole")
    info.type, info.size = tarfile.GNUTYPE_SPARSE, 1
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[386:410] = b"%011o\0%011o\0" % (0, 1)
    header[483:495] = b"\x80" + size.to_bytes(11, "big")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return gzip.compress(bytes(header) + b"x".ljust(512, b"\0") + bytes(1024))


HOSTILE: dict[str, Callable[[], bytes]] = {
    "symlink": lambda: packed((TOP + "link", tarfile.SYMTYPE, b"good.json")),
    "symlink to a folder outside": lambda: packed(
        (TOP + "out", tarfile.SYMTYPE, b"/tmp"), (TOP + "out/evil", tarfile.REGTYPE, b"x")
    ),
    "hard link": lambda: packed((TOP + "link", tarfile.LNKTYPE, b"top/good.json")),
    "absolute path": lambda: packed(("/evil", tarfile.REGTYPE, b"x")),
    "absolute path inside": lambda: packed((TOP + "a", tarfile.REGTYPE, b"x"), ("//top/evil", tarfile.REGTYPE, b"x")),
    "dots": lambda: packed((TOP + "../../evil", tarfile.REGTYPE, b"x")),
    "dots first": lambda: packed(("../evil", tarfile.REGTYPE, b"x")),
    "backslashes": lambda: packed((TOP + "..\\evil", tarfile.REGTYPE, b"x")),
    "drive": lambda: packed(("C:evil", tarfile.REGTYPE, b"x")),
    "character device": lambda: packed((TOP + "null", tarfile.CHRTYPE, b"")),
    "block device": lambda: packed((TOP + "disk", tarfile.BLKTYPE, b"")),
    "fifo": lambda: packed((TOP + "pipe", tarfile.FIFOTYPE, b"")),
    "unknown type": lambda: packed((TOP + "what", b"Z", b"")),
    "second top folder": lambda: packed(("other/x", tarfile.REGTYPE, b"x")),
    "file beside the top folder": lambda: packed(("x", tarfile.REGTYPE, b"x")),
    "file twice": lambda: packed((TOP + "good.json", tarfile.REGTYPE, b"[]")),
    "file as folder": lambda: packed((TOP + "good.json/x", tarfile.REGTYPE, b"[]")),
    "long path": lambda: packed((TOP + "x/" * 600 + "x", tarfile.REGTYPE, b"x")),
    "name that is no UTF-8": lambda: packed((TOP + "\udcff", tarfile.REGTYPE, b"x"), format=tarfile.GNU_FORMAT),
    "sparse file": lambda: sparse(1 << 40),
    "old sparse file": lambda: old_sparse(4 << 20),
    "absolute paths alone": lambda: absolute(),
    "size bomb": lambda: packed((TOP + "zeros", tarfile.REGTYPE, bytes(3 << 20))),
    "header bomb": lambda: packed((TOP + "x" * (2 << 20), tarfile.REGTYPE, b"x"), format=tarfile.GNU_FORMAT),
    "bomb after the end": lambda: gzip.compress(gzip.decompress(packed()) + bytes(3 << 20)),
    "cut off": lambda: packed()[:-20],
    "cut inside": lambda: packed((TOP + "a", tarfile.REGTYPE, bytes(range(256)) * 400))[:300],
    "wrong checksum": lambda: packed()[:-8] + bytes(8),
    "no gzip": lambda: b"hello" * 100,
    "no tar": lambda: gzip.compress(b"hello" * 200),
    "empty file": lambda: b"",
    "empty tar": lambda: gzip.compress(bytes(10240)),
    "sparse map that is no number": lambda: with_headers({"GNU.sparse.map": "0,1,2,x"}),
    "sparse version without a map": lambda: with_headers(
        {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "9"}
    ),
    "size that is negative": lambda: with_headers({"size": "-5"}),
    "header destroyed": lambda: without_header(TOP + "middle"),
    "no end": lambda: without_end(),
    "two gzip members": lambda: two_members(),
    "two tarballs": lambda: packed() + packed(),
    "garbage after the end": lambda: packed() + b"garbage",
    "many folders in few paths": lambda: packed(
        *((f"{TOP}{i}/" + "x/" * 20 + "x", tarfile.REGTYPE, b"") for i in range(4))
    ),
    "too many entries": lambda: tarball({f"f{i}": b"" for i in range(60)}),
}


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extraction, "MAX_ENTRIES", 50)
    monkeypatch.setattr(extraction.extract, "__kwdefaults__", {"max_bytes": 1 << 20})


def everything_under(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.name != "lock")


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_tarball_is_refused_and_leaves_nothing(kind: str, tmp_path: Path) -> None:
    content = HOSTILE[kind]()
    cache = RepositoryCache(tmp_path / "cache", "host", "acme", "packs")
    with pytest.raises(SourceError):
        cache.fetched(SHA, lambda file: _write(file, content))
    assert cache.folder(SHA) is None
    assert everything_under(cache.root) == [cache.root / "commits"]
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def _write(file: Any, content: bytes) -> None:
    file.write(content)


def test_a_plain_tarball_is_unpacked_without_its_top_folder(tmp_path: Path) -> None:
    files = {"a.json": b"{}", "sub/b.json": b"x" * 70_000, "sub/deep/c": b""}
    extract(io.BytesIO(tarball(files)), tmp_path / "out")
    found = {path.relative_to(tmp_path / "out").as_posix(): path.read_bytes() for path in _files(tmp_path / "out")}
    assert found == files


def test_a_path_has_a_depth() -> None:
    assert len(extraction.inner_path("x/" * 63 + "x").parts) == 64
    with pytest.raises(SourceError, match="not allowed"):
        extraction.inner_path("x/" * 64 + "x")


@pytest.mark.parametrize("padding", [0, 512, 10240])
def test_zeros_after_the_end_are_padding(tmp_path: Path, padding: int) -> None:
    plain = gzip.decompress(packed())
    extract(io.BytesIO(gzip.compress(plain + bytes(padding)) + bytes(padding)), tmp_path / "out")
    assert [path.name for path in _files(tmp_path / "out")] == ["good.json"]


def test_just_within_the_size_limit(tmp_path: Path) -> None:
    content = tarball({"a": bytes(1000 << 10)})
    extract(io.BytesIO(content), tmp_path / "out")
    assert (tmp_path / "out" / "a").stat().st_size == 1000 << 10


def test_a_setuid_or_world_writable_mode_is_not_taken_over(tmp_path: Path) -> None:
    info = tarfile.TarInfo(TOP + "tool")
    info.mode, info.uid = 0o6777, 12345
    extract(io.BytesIO(packed(info)), tmp_path / "out")
    mode = (tmp_path / "out" / "tool").stat().st_mode & 0o7777
    assert mode & 0o6111 == 0


def _files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]
