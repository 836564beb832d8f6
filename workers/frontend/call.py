"""One HTTP request as the frontend knows it: ids, caller, outcome. It travels in the ASGI scope."""

import time
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from workers.frontend.auth import Caller
from workers.frontend.body import BodyReader
from workers.frontend.routes import Route

CLIENT_GONE = 499
"""Logged and counted as the status of a call whose caller left; never sent."""
MAX_CALLER_ID = 128


@dataclass
class Call:
    request_id: str
    caller_id: str | None  # the caller's own X-Request-Id, for the log only
    route: Route
    caller: Caller
    reader: BodyReader
    started: float = field(default_factory=time.monotonic)
    received: float | None = None  # monotonic seconds at which the body was whole
    error: Exception | None = None  # what a route raised: the gate answers it
    status: int = 0
    code: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)  # from the worker's answer


def caller_id(values: list[bytes]) -> str | None:
    """A caller's request id that is fit for the log: printable ASCII, at most 128 characters."""
    if len(values) != 1 or not 0 < len(values[0]) <= MAX_CALLER_ID:
        return None
    return values[0].decode("ascii") if all(0x20 <= byte < 0x7F for byte in values[0]) else None


class Refused(Response):
    """What a route returns once it left an error for the gate: it sends nothing."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Leave the answer to the gate."""


def call_of(request: Request) -> Call:
    """The call that the gate put into the scope."""
    call: Call = request.scope["call"]
    return call
