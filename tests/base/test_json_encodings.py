"""Content encodings: expanded within the bound, refused past it."""

import gzip
import time
import tracemalloc
import zlib

import pytest

from spinf_serve.protocol.body import decode_body
from spinf_serve.protocol.errors import RequestError

BODY = b'{"messages": []}' * 1000
LIMIT = 1 << 20


def gzipped(data: bytes) -> bytes:
    """The same bytes at any time: they stand in the names of the tests."""
    return gzip.compress(data, mtime=0)


def raw_deflate(data: bytes) -> bytes:
    deflater = zlib.compressobj(wbits=-15)
    return deflater.compress(data) + deflater.flush()


@pytest.mark.parametrize("encoding", [None, "", "identity", "Identity", "identity, identity", ","])
def test_identity(encoding: str | None) -> None:
    assert decode_body(BODY, encoding, LIMIT) == BODY


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", gzipped(BODY)),
        (" GZip ", gzipped(BODY)),
        ("x-gzip", gzipped(BODY)),
        ("identity, gzip", gzipped(BODY)),
        ("gzip", gzipped(BODY[:99]) + gzipped(BODY[99:])),
        ("gzip", gzipped(b"") + gzipped(BODY) + b"\0" * 700),
        ("deflate", zlib.compress(BODY)),
        ("deflate", raw_deflate(BODY)),
        ("DEFLATE", zlib.compress(BODY, 0)),
        ("deflate", raw_deflate(BODY * 9)[:0] + raw_deflate(BODY)),
    ],
)
def test_expanded(encoding: str, body: bytes) -> None:
    assert decode_body(body, encoding, LIMIT) == BODY


@pytest.mark.parametrize(
    "encoding", ["br", "zstd", "gzip, br", "gzip, gzip", "deflate, gzip", "compress", "x", "gzip;q=1"]
)
def test_another_encoding_is_invalid_field(encoding: str) -> None:
    assert code(BODY, encoding) == "invalid_field"


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", b""),
        ("gzip", BODY),
        ("gzip", gzipped(BODY)[:-1]),
        ("gzip", gzipped(BODY)[:20]),
        ("gzip", gzipped(BODY) + b"tail"),
        ("gzip", gzipped(BODY) + gzipped(BODY)[:30]),
        ("gzip", gzipped(BODY)[:-8] + b"\0" * 8),  # checksum
        ("gzip", b"\0" * 9 + gzipped(BODY)),
        ("deflate", b""),
        ("deflate", BODY),
        ("deflate", zlib.compress(BODY)[:-1]),
        ("deflate", raw_deflate(BODY)[:-1]),
        ("deflate", zlib.compress(BODY) + b"tail"),
        ("deflate", gzipped(BODY)),
    ],
)
def test_corrupt_or_cut_off_is_invalid_json(encoding: str, body: bytes) -> None:
    assert code(body, encoding) == "invalid_json"


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "raw", "identity"])
def test_expanded_size_counts_exactly(encoding: str) -> None:
    pack = {"gzip": gzipped, "deflate": zlib.compress, "raw": raw_deflate, "identity": bytes}[encoding]
    name = "deflate" if encoding == "raw" else encoding
    assert decode_body(pack(b"a" * 5000), name, 5000) == b"a" * 5000
    assert code(pack(b"a" * 5001), name, 5000) == "body_too_large"
    assert code(pack(b"a" * 3000) + pack(b"a" * 3000), name, 5000) == (
        "invalid_json" if name == "deflate" else "body_too_large"
    )


def test_a_bomb_is_not_expanded() -> None:
    bomb = gzipped(b"\0" * (64 << 20))
    tracemalloc.start()
    assert code(bomb, "gzip", 100_000) == "body_too_large"
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 << 20


def test_many_members_take_linear_time() -> None:
    member = gzipped(b"")
    body = member * (1_000_000 // len(member))
    start = time.perf_counter()
    assert decode_body(body, "gzip", LIMIT) == b""
    assert time.perf_counter() - start < 5


def code(body: bytes, encoding: str, limit: int = LIMIT) -> str:
    with pytest.raises(RequestError) as error:
        decode_body(body, encoding, limit)
    return error.value.code
