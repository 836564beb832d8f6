"""The way of one scoring call through the frontend: door, body, worker, answer. It never looks into the body."""

import asyncio
import time
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response

from spinf_serve.config import FrontendConfig
from spinf_serve.protocol.errors import RequestError
from spinf_serve.wire.frontend import Answer, Serving
from spinf_serve.wire.preprocess import Work
from workers.frontend.admission import Admission
from workers.frontend.body import (
    ClientGone,
    check_transfer_coding,
    content_length,
    header_values,
    read_body,
    too_large,
)
from workers.frontend.call import Call, call_of
from workers.frontend.dispatch import Dispatcher, Outcome
from workers.frontend.state import refusal, restarting


class Scoring:
    """Handles POST /v1/score, /v1/chat/completions and /v0/score. `serving` gives the supervisor's last word."""

    def __init__(
        self,
        config: FrontendConfig,
        admission: Admission,
        dispatcher: Dispatcher,
        serving: Callable[[], Serving],
        owed: set[str],
    ) -> None:
        self._config = config
        self._admission = admission
        self._dispatcher = dispatcher
        self._serving = serving
        self._owed = owed  # ids of admitted calls that are not over

    async def __call__(self, request: Request) -> Response:
        """The response; raises RequestError or ClientGone."""
        call = call_of(request)
        headers = request.scope["headers"]
        if error := refusal(self._serving()):
            raise error
        check_transfer_coding(headers)
        length = content_length(headers)
        if length is not None and length > self._config.max_body_bytes:
            raise too_large(self._config.max_body_bytes)
        self._owed.add(call.request_id)
        body = await read_body(call.reader, self._config.max_body_bytes, self._config.body_timeout, self._admission)
        call.received = time.monotonic()
        with self._admission.call():
            # The engine may be gone by now. A stop that began meanwhile is no reason: this call was there before it.
            if self._serving().phase != "ready":
                raise restarting()
            answer = await self._score(call, body, b", ".join(header_values(headers, b"content-encoding")))
        call.code = answer.code
        call.facts = answer.facts
        return _response(answer)

    async def _score(self, call: Call, body: bytes, content_encoding: bytes) -> Answer:
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        work = Work(
            request_id=call.request_id,
            attempt=1,
            route=call.route.name,
            trusted=call.caller.trusted,
            content_encoding=content_encoding.decode("latin-1") or None,
            received=call.received or call.started,
            body=body,
        )
        self._dispatcher.submit(work, lambda result: None if outcome.done() else outcome.set_result(result))
        watch = asyncio.create_task(_until_gone(call))
        try:
            await asyncio.wait((outcome, watch), return_when=asyncio.FIRST_COMPLETED)
            if not outcome.done():
                raise ClientGone
        finally:
            watch.cancel()
            self._dispatcher.cancel(call.request_id)  # nothing to do once an outcome is there
        result = outcome.result()
        if isinstance(result, RequestError):
            raise result
        return result


async def _until_gone(call: Call) -> None:
    """Return when the caller has closed the connection."""
    while not call.reader.gone:
        await call.reader()


def _response(answer: Answer) -> Response:
    headers = {} if answer.retry_after is None else {"retry-after": str(answer.retry_after)}
    return Response(answer.body, answer.status, headers, media_type="application/json")
