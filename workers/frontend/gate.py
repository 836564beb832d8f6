"""The outermost ASGI application: request id, token, path and method, the envelope of every error, one line of log.

Order of checks: 401, then 404 / 405; the routes go on with 503, 413 by Content-Length, 429, and the body.
"""

import json
import logging
import time
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spinf_serve.logs import facts
from spinf_serve.protocol.errors import RequestError
from spinf_serve.protocol.ids import new_request_id
from workers.frontend.auth import Auth
from workers.frontend.body import BodyReader, ClientGone, content_length, header_values
from workers.frontend.call import CLIENT_GONE, Call, caller_id
from workers.frontend.routes import OTHER, TRUSTED_PREFIX, Route, find_route

log = logging.getLogger("spinf_serve.calls")
faults = logging.getLogger(__name__)

JSON = b"application/json"
Header = tuple[bytes, bytes]


class Gate:
    """Wraps the routes. `is_stopping` decides whether a 503 also closes the connection."""

    def __init__(
        self,
        app: ASGIApp,
        auth: Auth,
        *,
        max_body_bytes: int,
        metrics_auth: bool,
        is_stopping: Callable[[], bool],
        on_end: Callable[[Call], None],
    ) -> None:
        self._app = app
        self._auth = auth
        self._max_body_bytes = max_body_bytes
        self._metrics_auth = metrics_auth
        self._is_stopping = is_stopping
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request from its head to its line in the log."""
        headers = scope["headers"]
        route = find_route(scope["path"], scope["raw_path"])
        call = Call(
            request_id=new_request_id(),
            caller_id=caller_id(header_values(headers, b"x-request-id")),
            route=route or OTHER,
            caller=self._auth.caller(header_values(headers, b"authorization")),
            reader=BodyReader(receive, headers),
        )
        scope["call"] = call
        answer = _Answer(call, send)
        try:
            self._check(scope["method"], scope["path"], route, call)
            await self._app(scope, call.reader, answer)
            if call.error is not None:
                raise call.error
        except ClientGone:
            call.status = CLIENT_GONE
        except RequestError as error:
            await self._refuse(error, call, answer, scope)
        except Exception:
            faults.exception("a request failed unexpectedly", extra=facts(request_id=call.request_id))
            unexpected = RequestError("engine_error", "an unexpected error inside the server")
            await self._refuse(unexpected, call, answer, scope)
        finally:
            self._end(call)

    def _check(self, method: str, path: str, route: Route | None, call: Call) -> None:
        if not self._admits(path, route, call):
            raise RequestError("invalid_token", self._missing(call))
        if route is None:
            raise RequestError("not_found", "no such path")
        if method not in route.methods:
            raise RequestError("method_not_allowed", f"allowed here: {', '.join(route.methods)}")

    def _admits(self, path: str, route: Route | None, call: Call) -> bool:
        if route is not None and route.open and not (self._metrics_auth and route.name == "metrics"):
            return True
        if path.startswith(TRUSTED_PREFIX):
            return call.caller.trusted
        return call.caller.access

    def _missing(self, call: Call) -> str:
        """What a call that is not admitted lacks. Who may call /v1 is told that /v0 wants more."""
        if self._auth.open:
            return "this call is for trusted callers alone, and a server without a token has none"
        if call.caller.access:
            return "this call needs the trusted token: Authorization: Bearer <trusted token>"
        return "this call needs a valid token: Authorization: Bearer <token>"

    async def _refuse(self, error: RequestError, call: Call, answer: "_Answer", scope: Scope) -> None:
        if answer.started:
            return  # too late for an envelope; the server closes the unfinished response
        call.code = error.code
        body = json_bytes(error.envelope(call.request_id, rejected=call.caller.trusted))
        # A body that nobody will read: up to the limit the HTTP library reads it away and the connection lives on.
        length = content_length(scope["headers"])
        unread = not call.reader.whole
        overlong = unread and (length is None or length > self._max_body_bytes)
        hopeless = unread and (call.reader.never_sent or call.reader.given_up)
        close = overlong or hopeless or (error.status == 503 and self._is_stopping())
        await answer.head(error.status, _headers(error, call, len(body), close))
        await answer.send_body(body, more=overlong)
        if overlong:
            if not hopeless:
                await call.reader.discard(self._max_body_bytes)
            await answer.send_body(b"", more=False)

    def _end(self, call: Call) -> None:
        self._on_end(call)
        if call.route.probe:
            return
        log.info(
            "call",
            extra=facts(
                request_id=call.request_id,
                caller_id=call.caller_id,
                route=call.route.name,
                status=call.status,
                code=call.code,
                **call.facts,
                total_ms=round((time.monotonic() - call.started) * 1000, 1),
            ),
        )


def _headers(error: RequestError, call: Call, length: int, close: bool) -> list[Header]:
    headers: list[Header] = [(b"content-type", JSON), (b"content-length", str(length).encode())]
    if error.retry_after is not None:
        headers.append((b"retry-after", str(error.retry_after).encode()))
    if error.code == "invalid_token":
        headers.append((b"www-authenticate", b"Bearer"))
    if error.code == "method_not_allowed":
        headers.append((b"allow", ", ".join(call.route.methods).encode()))
    if close:
        headers.append((b"connection", b"close"))
    return headers


class _Answer:
    """ASGI `send` that adds the request id and notes the status, also that the caller left before the end."""

    def __init__(self, call: Call, send: Send) -> None:
        self._call = call
        self._send = send
        self.started = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            self._call.status = message["status"]
            identified = (b"x-request-id", self._call.request_id.encode())
            message = {**message, "headers": [*message.get("headers", []), identified]}
        try:
            await self._send(message)
        except ClientGone:
            self._call.status, self._call.code = CLIENT_GONE, None

    async def head(self, status: int, headers: list[Header]) -> None:
        """Status line and headers."""
        await self({"type": "http.response.start", "status": status, "headers": headers})

    async def send_body(self, body: bytes, *, more: bool) -> None:
        """A piece of the body."""
        await self({"type": "http.response.body", "body": body, "more_body": more})


def json_bytes(value: Any) -> bytes:
    """Compact JSON."""
    return json.dumps(value, separators=(",", ":")).encode()
