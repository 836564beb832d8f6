"""The HTTP routes, as a FastAPI application behind the gate. Handlers see bytes and state, never a scoring body."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from spinf_serve.config import FrontendConfig
from spinf_serve.protocol.errors import RequestError
from spinf_serve.wire.frontend import Packs, Serving
from workers.frontend import describe
from workers.frontend.admission import Admission
from workers.frontend.auth import Auth
from workers.frontend.call import Call, Refused, call_of
from workers.frontend.dispatch import Dispatcher
from workers.frontend.gate import Gate, json_bytes
from workers.frontend.metrics import CONTENT_TYPE, Metrics
from workers.frontend.packs import pack_content
from workers.frontend.routes import PACK_PREFIX, ROUTES
from workers.frontend.scoring import Scoring
from workers.frontend.state import readiness, restarting

DRAIN_ACK_S = 5.0
PACKS_RETRY_S = 2


class Site:
    """State behind the routes. `ask_drain` passes a drain request on to the supervisor."""

    def __init__(
        self, config: FrontendConfig, dispatcher: Dispatcher, metrics: Metrics, ask_drain: Callable[[bool], None]
    ) -> None:
        self.config = config
        self.dispatcher = dispatcher
        self.metrics = metrics
        self.admission = Admission(config.queue)
        self.owed: set[str] = set()  # ids of calls past the door whose answer is not written yet
        self.serving = Serving()
        self.packs_loaded: Packs | None = None
        self._ask_drain = ask_drain
        self._reported = asyncio.Condition()
        self._notifications: set[asyncio.Task[None]] = set()

    def report(self, serving: Serving) -> None:
        """The supervisor's new word. Calls in flight end with the engine that had them."""
        had_engine = self.serving.phase == "ready"
        self.serving = serving
        self.metrics.serving(serving)
        if had_engine and serving.phase != "ready":
            self.dispatcher.fail_all(restarting())
        task = asyncio.get_running_loop().create_task(self._notify())
        self._notifications.add(task)
        task.add_done_callback(self._notifications.discard)

    async def _notify(self) -> None:
        async with self._reported:
            self._reported.notify_all()

    def ended(self, call: Call) -> None:
        """A call is over: its answer is written, or its caller gone."""
        self.owed.discard(call.request_id)
        self.metrics.ended(call, time.monotonic())

    def scoring(self) -> Scoring:
        """The handler of the scoring routes."""
        return Scoring(self.config, self.admission, self.dispatcher, lambda: self.serving, self.owed)

    async def healthz(self, _request: Request) -> Response:
        """The frontend is up."""
        return _json({"ok": True})

    async def readyz(self, _request: Request) -> Response:
        """Whether traffic should come here."""
        body = readiness(self.serving)
        return _json(body, 200 if body["ready"] else 503)

    async def livez(self, _request: Request) -> Response:
        """Whether the server is worth keeping."""
        return _json({"live": self.serving.live}, 200 if self.serving.live else 503)

    async def models(self, _request: Request) -> Response:
        """The served model."""
        return _json(describe.models(self.config, self.serving))

    async def packs(self, _request: Request) -> Response:
        """The packs that requests can use."""
        return Response(self._packs().listing, media_type="application/json")

    async def pack(self, request: Request) -> Response:
        """A pack's file."""
        files = self._packs().files
        content = pack_content(files, request.path_params["pack_id"], request.query_params.get("version"))
        return Response(content, media_type="application/json")

    def _packs(self) -> Packs:
        if self.packs_loaded is None:
            raise RequestError("warming_up", "the packs are being loaded", retry_after=PACKS_RETRY_S)
        return self.packs_loaded

    async def info(self, _request: Request) -> Response:
        """What produces the scores."""
        return _json(describe.info(self.config, self.serving))

    async def drain(self, request: Request) -> Response:
        """Start (POST) or end (DELETE) draining; answered once the supervisor has taken note."""
        wanted = request.method == "POST"
        async with self._reported:
            self._ask_drain(wanted)
            try:
                async with asyncio.timeout(DRAIN_ACK_S):
                    await self._reported.wait_for(lambda: self.serving.draining == wanted)
            except TimeoutError:
                raise RequestError("engine_error", "the supervisor did not answer") from None
        return _json({"draining": self.serving.draining or self.serving.stopping})

    async def metrics_text(self, _request: Request) -> Response:
        """Everything that is counted."""
        body = self.metrics.render(
            running=self.dispatcher.running, waiting=self.dispatcher.waiting, dropped=self.dispatcher.dropped
        )
        return Response(body, media_type=CONTENT_TYPE)


def _json(value: Any, status: int = 200) -> Response:
    return Response(json_bytes(value), status, media_type="application/json")


Handler = Callable[[Request], Awaitable[Response]]


def _guarded(handler: Handler) -> Handler:
    """The handler, with its exceptions left to the gate: FastAPI's own error pages never show."""

    async def guarded(request: Request) -> Response:
        try:
            return await handler(request)
        except Exception as error:
            call_of(request).error = error
            return Refused()

    return guarded


def build(site: Site, *, is_stopping: Callable[[], bool]) -> ASGIApp:
    """The ASGI application: the gate around the routes."""
    config = site.config
    handlers: dict[str, Handler] = {
        **dict.fromkeys(("score", "chat", "v0_score"), site.scoring().__call__),
        **dict.fromkeys(("readyz", "health"), site.readyz),
        **dict.fromkeys(("livez", "ping"), site.livez),
        "healthz": site.healthz,
        "models": site.models,
        "packs": site.packs,
        "info": site.info,
        "drain": site.drain,
        "metrics": site.metrics_text,
    }
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    for path, route in ROUTES.items():
        app.add_api_route(path, _guarded(handlers[route.name]), methods=list(route.methods), response_model=None)
    app.add_api_route(PACK_PREFIX + "{pack_id:path}", _guarded(site.pack), methods=["GET"], response_model=None)
    return Gate(
        app,
        Auth(config.token, config.trusted_token),
        max_body_bytes=config.max_body_bytes,
        metrics_auth=config.metrics_auth,
        is_stopping=is_stopping,
        on_end=site.ended,
    )
