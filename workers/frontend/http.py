"""The HTTP library's connection, with an end to connections that never finish a request head.

uvicorn bounds only the pause between two requests. Without more, idle or trickling connections would pile up until the
process has no descriptor left, and heads could grow without limit.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

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

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock of the first head."""
        super().connection_made(transport)
        self._start_clock(self.timeout_keep_alive)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._stop_clock()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count what belongs to a head; one that is too long ends the connection."""
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The request head is too long.")

    def on_message_begin(self) -> None:
        """The first byte of a head."""
        super().on_message_begin()
        self._start_clock(HEAD_S)

    def on_headers_complete(self) -> None:
        """The head is there."""
        self._in_head = False
        self._stop_clock()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The next bytes are a new head."""
        super().on_message_complete()
        self._stop_clock()
        self._in_head = True
        self._head_bytes = 0

    def on_response_complete(self) -> None:
        """Answered; what is left of its body has a limited time to be read away."""
        super().on_response_complete()
        if not self._in_head and not self.transport.is_closing():
            self._start_clock(HEAD_S)

    def _start_clock(self, seconds: float) -> None:
        self._stop_clock()
        self._head_timer = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

    def _stop_clock(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
