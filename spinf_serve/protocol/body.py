"""The bytes of a request body: content encodings, undone within the body limit."""

import zlib

from spinf_serve.protocol.errors import RequestError

_CHUNK = 4096
"""Bytes handed to the decompressor at once: what follows a gzip member is copied, so a chunk bounds that cost too."""

_GZIP, _ZLIB, _RAW = 31, 15, -15  # zlib's `wbits`


def decode_body(body: bytes, content_encoding: str | None, max_bytes: int) -> bytes:
    """The body as it was before its `Content-Encoding`: identity, gzip or deflate (zlib-wrapped or raw).

    Raises `RequestError`: invalid_field for another encoding, invalid_json for a corrupt or truncated body,
    body_too_large once the expanded size is over `max_bytes` (nothing is expanded past that).
    """
    codings = [c for c in (part.strip().lower() for part in (content_encoding or "").split(",")) if c]
    codings = [c for c in codings if c != "identity"]
    if not codings:
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
        return body
    if codings in (["gzip"], ["x-gzip"]):
        return _gunzip(body, max_bytes)
    if codings == ["deflate"]:
        return _inflate(body, max_bytes)
    raise RequestError("invalid_field", "Content-Encoding must be identity, gzip or deflate")


def _too_large(max_bytes: int) -> RequestError:
    return RequestError("body_too_large", f"the expanded body is over {max_bytes} bytes")


def _corrupt(why: str) -> RequestError:
    return RequestError("invalid_json", f"the compressed body is {why}")


class _Bounded:
    """Collects expanded bytes and refuses the first byte over the bound."""

    def __init__(self, max_bytes: int) -> None:
        self.parts: list[bytes] = []
        self.left = self.max_bytes = max_bytes

    def feed(self, inflater: "zlib._Decompress", data: bytes) -> None:
        part = inflater.decompress(data, self.left + 1)
        if len(part) > self.left:
            raise _too_large(self.max_bytes)
        self.left -= len(part)
        self.parts.append(part)


def _gunzip(body: bytes, max_bytes: int) -> bytes:
    """All members of a gzip file; zero padding after a member is allowed, as gzip(1) does."""
    out = _Bounded(max_bytes)
    member, members = None, 0
    try:
        for start in range(0, len(body), _CHUNK):
            data = body[start : start + _CHUNK]
            while data:
                if member is None:
                    data = data.lstrip(b"\0") if members else data
                    if not data:
                        break
                    member, members = zlib.decompressobj(_GZIP), members + 1
                out.feed(member, data)
                data = member.unused_data
                member = None if member.eof else member
    except zlib.error:
        raise _corrupt("not gzip") from None
    if member is not None or not members:
        raise _corrupt("cut off")
    return b"".join(out.parts)


def _inflate(body: bytes, max_bytes: int) -> bytes:
    for wbits in (_ZLIB, _RAW):
        out, inflater = _Bounded(max_bytes), zlib.decompressobj(wbits)
        try:
            for start in range(0, len(body), _CHUNK):
                if inflater.eof:
                    raise zlib.error
                out.feed(inflater, body[start : start + _CHUNK])
        except zlib.error:
            continue
        if inflater.eof and not inflater.unused_data:
            return b"".join(out.parts)
    raise _corrupt("not deflate, or cut off")
