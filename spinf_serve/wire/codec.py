"""A message to frames and back: [msgpack header, raw frame, ...]. No pickle, no list of integers, no copy of an array.

Header: {"v": protocol version, "t": class name, "f": fields}. Decoding is strict: another version, an unknown name,
missing or additional fields, another type, dtype, shape or frame size, and left-over frames are all a `WireError`.
"""

from collections.abc import Buffer, Sequence
from typing import Any

import msgpack

from spinf_serve.wire.errors import VersionMismatch, WireError
from spinf_serve.wire.fields import field_of
from spinf_serve.wire.registry import MESSAGES, PROTOCOL_VERSION


def encode(message: Any) -> list[Any]:
    """Frames of a registered message. Raises WireError when a field does not hold what its annotation says."""
    name = type(message).__name__
    if MESSAGES.get(name) is not type(message):
        raise WireError(f"{name} is not a registered message")
    frames: list[Any] = []
    try:
        fields = field_of(type(message))[0](message, frames)
        header = msgpack.packb({"v": PROTOCOL_VERSION, "t": name, "f": fields}, unicode_errors="surrogatepass")
    except (WireError, ValueError, TypeError, OverflowError) as error:
        raise WireError(f"{name}: {error}") from None
    return [header, *frames]


def decode(frames: Sequence[Buffer], accepts: Sequence[type[Any]] | None = None) -> Any:
    """The message in `frames`, one of `accepts` (None: any registered one). Arrays are views of their frames."""
    if not frames:
        raise WireError("a message without a header")
    name, fields = _open(frames[0])
    cls = MESSAGES.get(name)
    if cls is None:
        raise WireError(f"unknown message {name[:60]!r}")
    if accepts is not None and cls not in accepts:
        raise WireError(f"{name} was sent to a process that does not take it")
    rest = iter(frames[1:])
    try:
        message = field_of(cls)[1](fields, rest)
    except WireError as error:
        raise WireError(f"{name}: {error}") from None
    if next(rest, None) is not None:
        raise WireError(f"{name}: more frames than arrays")
    return message


def _open(header: Buffer) -> tuple[str, Any]:
    try:
        opened = msgpack.unpackb(header, unicode_errors="surrogatepass", strict_map_key=True)
    except (ValueError, msgpack.UnpackException) as error:
        raise WireError(f"a header that is not msgpack: {type(error).__name__}") from None
    if not isinstance(opened, dict) or "v" not in opened:
        raise WireError("a header without a protocol version")
    fields = opened.get("f")
    if opened["v"] != PROTOCOL_VERSION:
        sender = fields.get("sender") if isinstance(fields, dict) else None
        raise VersionMismatch(opened["v"], PROTOCOL_VERSION, sender if isinstance(sender, str) else None)
    if opened.keys() != {"v", "t", "f"} or not isinstance(opened["t"], str):
        raise WireError("a header that is not {v, t, f}")
    return opened["t"], fields
