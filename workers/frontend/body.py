"""Reading a request body within its limits, and reading away what nobody wants. Works on ASGI messages."""

import asyncio
from collections.abc import Sequence

from starlette.types import Message, Receive

from spinf_serve.protocol.errors import RequestError
from workers.frontend.admission import GRACE_BYTES, GRACE_S, Admission, Reading, busy

DISCARD_FACTOR = 8
DISCARD_S = 5.0
Headers = Sequence[tuple[bytes, bytes]]


class ClientGone(Exception):
    """The caller closed the connection."""


def header_values(headers: Headers, name: bytes) -> list[bytes]:
    """All values of a header; ASGI names are lower case."""
    return [value for key, value in headers if key == name]


def content_length(headers: Headers) -> int | None:
    """The announced length of the body; None without one (chunked, or no body). The HTTP library checked its form."""
    values = header_values(headers, b"content-length")
    return int(values[0]) if values else None


def has_body(headers: Headers) -> bool:
    """Whether a body was announced."""
    return bool(content_length(headers)) or bool(header_values(headers, b"transfer-encoding"))


def check_transfer_coding(headers: Headers) -> None:
    """Raises `invalid_field` for a body that was coded for its transfer by more than chunks (RFC 9112, 6.1)."""
    named = b", ".join(header_values(headers, b"transfer-encoding"))
    codings = [coding for coding in (part.strip().lower() for part in named.split(b",")) if coding]
    if codings not in ([], [b"chunked"]):
        found = named[:64].decode("ascii", "backslashreplace")
        raise RequestError("invalid_field", f"Transfer-Encoding: {found} is not read, only chunked is")


def too_large(limit: int) -> RequestError:
    """413 for a body over `limit` bytes."""
    return RequestError("body_too_large", f"the request body is over {limit} bytes")


class BodyReader:
    """ASGI `receive` of one request that remembers how far its body came."""

    def __init__(self, receive: Receive, headers: Headers) -> None:
        self._receive = receive
        self._expects_continue = any(v.lower() == b"100-continue" for v in header_values(headers, b"expect"))
        self.whole = not has_body(headers)
        self.gone = False
        self.asked = False
        self.received = 0
        self.given_up = False  # it came too slowly

    async def __call__(self) -> Message:
        """The next message, as the server gives it."""
        self.asked = True
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.gone = True
        else:
            self.received += len(message.get("body", b""))
            self.whole = self.whole or not message.get("more_body", False)
        return message

    @property
    def never_sent(self) -> bool:
        """The client waits for "100 Continue", which it was not given: there is no body on its way."""
        return self._expects_continue and not self.asked

    async def discard(self, limit: int) -> None:
        """Read the rest away, up to 8 times `limit` bytes or 5 s, so that the client gets to see its answer."""
        try:
            async with asyncio.timeout(DISCARD_S):
                while not self.whole and not self.gone and self.received < DISCARD_FACTOR * limit:
                    await self()
        except TimeoutError:
            return


async def read_body(reader: BodyReader, limit: int, timeout_s: float, admission: Admission) -> bytes:
    """The whole body. Raises `body_too_large`, `concurrency_limit`, `invalid_field` for one that takes longer than
    `timeout_s`, or ClientGone.
    """
    loop = asyncio.get_running_loop()
    reading: Reading | None = None
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            with admission.reading(loop.time(), evict=lambda: deadline.reschedule(loop.time())) as reading:
                if not reading.slotted:
                    deadline.reschedule(loop.time() + min(GRACE_S, timeout_s))
                return await _read_whole(reader, limit, reading)
    except TimeoutError:
        reader.given_up = True
        if reading is not None and (reading.evicted or not reading.slotted):
            raise busy("the body came too slowly while others waited") from None
        raise RequestError("invalid_field", f"the body did not arrive within {timeout_s:g} s", "body") from None


async def _read_whole(reader: BodyReader, limit: int, reading: Reading) -> bytes:
    chunks: list[bytes] = []
    while True:
        message = await reader()
        if reader.gone:
            raise ClientGone
        chunks.append(message.get("body", b""))
        reading.received = reader.received
        if reader.received > limit:
            raise too_large(limit)
        if reader.whole:
            return b"".join(chunks)
        if not reading.slotted and reader.received > GRACE_BYTES:
            raise busy("too many request bodies are arriving at once")
