"""The HTTP library's connection, with an end to connections that never finish a request head.

uvicorn bounds only the pause between two requests. Without more, idle or trickling connections would pile up until the
process has no descriptor left, and heads could grow without limit. It also loses the body of a request that offers
another protocol, and does not tell a pipelined request that its caller left.
"""

import asyncio
from typing import Any

from httptools import HttpRequestParser
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from workers.frontend.body import ClientGone, content_length

HEAD_S = 30.0
"""For a request's head to arrive, from its first byte on; and for a body that nobody reads to end."""
MAX_HEAD_BYTES = 64 << 10


class Connection(HttpToolsProtocol):
    """One client connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._in_head = True
        self._body_left: int | None = None  # bytes of a body with a Content-Length that are not there yet
        self._offering: bytes | None = None  # a head that offers another protocol, without its offer
        self._answering: RequestResponseCycle | None = None
        self._refusal: str | None = None  # a fault in the bytes, to be told once the requests before it are answered

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock of the first head."""
        super().connection_made(transport)
        self._start_clock(self.timeout_keep_alive)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock, and tell the request that is being answered: uvicorn tells only the last one it read."""
        self._stop_clock()
        super().connection_lost(exc)
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Feed the parser up to where a head or a body may end, so that a head's bytes are counted exactly."""
        start = 0
        while start < len(data) and self._refusal is None and not self.transport.is_closing():
            end = max(start + 1, self._piece_end(data, start))
            if self._in_head:
                self._head_bytes += end - start
            elif self._body_left is not None:
                self._body_left -= end - start
            self._feed(data[start:end])
            start = end

    def _piece_end(self, data: bytes, start: int) -> int:
        if not self._in_head and self._body_left is not None:
            return min(len(data), start + self._body_left)
        end = after_empty_line(data, start)
        return min(end, start + MAX_HEAD_BYTES - self._head_bytes) if self._in_head else end

    def _feed(self, piece: bytes) -> None:
        super().data_received(piece)
        if self._offering is not None:
            # The parser took the head for the end of HTTP on this connection. RFC 9110, 7.8: a server may ignore the
            # offer. The piece ended with the head, so the same head without it puts a parser before the body: a new
            # one, since the old one reads nothing more after a head that also says "close".
            head, self._offering = self._offering, None
            self.parser = HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
            super().data_received(head)
        if self._in_head and self._head_bytes >= MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The request head is too long.")

    def send_400_response(self, msg: str) -> None:
        """Refuse the bytes that came last, after the answers that are due before: it must not pass for one of them."""
        if not self._in_head and self.pipeline:
            self.pipeline.popleft()  # the body that is broken is that of the last request
        elif not self._in_head or self._answering is None or self._answering.response_complete:
            super().send_400_response(msg)
            return
        self._refusal = msg
        self._stop_clock()

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing to warn of: the offer is ignored."""

    def on_message_begin(self) -> None:
        """The first byte of a head."""
        super().on_message_begin()
        self._start_clock(HEAD_S)

    def on_headers_complete(self) -> None:
        """The head is there."""
        if self.parser.should_upgrade():
            self._offering = self._head_without_offer()
            return
        super().on_headers_complete()
        self._in_head = False
        self._body_left = content_length(self.headers)
        self._stop_clock()

    def on_message_complete(self) -> None:
        """The next bytes are a new head."""
        if self._offering is not None:
            return  # only the parser thinks so
        super().on_message_complete()
        self._stop_clock()
        self._in_head = True
        self._head_bytes = 0

    def on_response_complete(self) -> None:
        """Answered; what is left of its body has a limited time to be read away."""
        super().on_response_complete()
        if self._refusal is not None and not self.transport.is_closing():
            if self._answering is not None and self._answering.response_complete:
                super().send_400_response(self._refusal)
            return
        if not self._in_head and not self.transport.is_closing():
            self._start_clock(HEAD_S)

    def _head_without_offer(self) -> bytes:
        method = self.parser.get_method()
        if method == b"CONNECT":
            raise ValueError("a tunnel is no offer: there is no request without it")
        line = b"%s %s HTTP/%s\r\n" % (method, self.url, self.parser.get_http_version().encode())
        fields = [b"%s: %s\r\n" % field for field in self.headers if field[0] != b"upgrade"]
        return b"".join((line, *fields, b"\r\n"))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        self._answering = cycle
        super()._start_asgi_task(cycle, _told_of_departures(cycle, app))  # type: ignore[arg-type]

    def _start_clock(self, seconds: float) -> None:
        self._stop_clock()
        self._head_timer = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

    def _stop_clock(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def after_empty_line(data: bytes, start: int) -> int:
    """Where the first empty line at or after `start` ends, or all of `data`: a head ends so, and a chunked body.

    A line end at `start` itself counts, since what was before it may have arrived earlier.
    """
    for rest in (b"\n", b"\r\n"):
        if data.startswith(rest, start):
            return start + len(rest)
    found = data.find(b"\n\r\n", start)
    return len(data) if found < 0 else found + 3


def _told_of_departures(cycle: RequestResponseCycle, app: ASGIApp) -> ASGIApp:
    """The application with a `send` that raises ClientGone where an answer has nowhere to go."""

    async def told(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_or_tell(message: Message) -> None:
            if cycle.transport.is_closing():  # the event loop may not have said so yet
                cycle.disconnected = True
            if not cycle.disconnected:
                await send(message)
            if cycle.disconnected and not cycle.response_complete:
                raise ClientGone

        await app(scope, receive, send_or_tell)

    return told
