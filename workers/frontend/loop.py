"""The frontend's loop: uvicorn on the inherited sockets, the inbox beside it. Runs in the frontend process."""

import asyncio
import contextlib
import gc
import logging
import resource
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
import uvloop

from spinf_serve.logs import facts
from spinf_serve.supervisor.member import Member
from spinf_serve.wire.child import Stop
from spinf_serve.wire.errors import WireError
from spinf_serve.wire.frontend import Answer, Credit, FrontendSetup, Packs, Serving, WorkerLost
from spinf_serve.wire.queues import AsyncInbox, Outbox
from spinf_serve.wire.supervisor import ChildReady, DrainRequest, EngineStats, InFlight
from workers.frontend.app import Site, build
from workers.frontend.dispatch import Dispatcher
from workers.frontend.http import Connection
from workers.frontend.metrics import Metrics
from workers.frontend.state import stopping

log = logging.getLogger(__name__)

TICK_S = 0.2
CLOSE_S = 1
"""For connections to take their last bytes once everything was answered."""


class _Server(uvicorn.Server):
    """Signals are the supervisor's business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Frontend:
    """Everything between the sockets: HTTP on one side, workers and supervisor on the other."""

    def __init__(self, member: Member, setup: FrontendSetup) -> None:
        self._member = member
        self._setup = setup
        self._outboxes: dict[str, Outbox] = {}
        self._dispatcher = Dispatcher(self._post, asyncio.get_running_loop().call_later)
        metrics = Metrics(setup.config.model.id)
        self._site = Site(setup.config, self._dispatcher, metrics, self._ask_drain)
        self._told: int | None = None
        app = build(self._site, is_stopping=lambda: self._site.serving.stopping)
        self._server = _Server(
            uvicorn.Config(
                app,
                http=Connection,
                loop="uvloop",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=max(1, round(setup.config.keepalive)),
                timeout_graceful_shutdown=CLOSE_S,
            )
        )
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            Serving: self._on_serving,
            Packs: self._on_packs,
            WorkerLost: self._on_worker_lost,
            Credit: self._dispatcher.credit,
            Answer: self._dispatcher.answer,
            EngineStats: metrics.engine,
            Stop: self._on_stop,
        }

    async def run(self) -> None:
        """Serve until the supervisor says stop."""
        self._site.report(self._setup.serving)
        inbox = AsyncInbox(self._member.inbox, self._on_message, self._on_bad_message)
        for message in self._member.waiting:
            self._on_message(message)
        ticker = asyncio.create_task(self._tick())
        try:
            listeners = [socket.socket(fileno=fd) for fd in self._setup.listeners]
            await self._server.serve(sockets=listeners)
        finally:
            ticker.cancel()
            inbox.detach()
            for outbox in self._outboxes.values():
                outbox.close()

    async def _tick(self) -> None:
        """Prove that the event loop turns, and report once HTTP is served."""
        while not self._server.started:
            self._member.progress.tick()
            await asyncio.sleep(0.01)
        self._member.tell(ChildReady(self._member.name))
        while True:
            self._member.progress.tick()
            self._report_calls()
            await asyncio.sleep(TICK_S if not self._site.serving.stopping else 0.01)

    def _post(self, inbox: str, message: Any) -> bool:
        outbox = self._outboxes.get(inbox)
        if outbox is None:
            outbox = self._outboxes[inbox] = Outbox(inbox)
        try:
            outbox.send(message)
        except WireError as error:
            log.error("message not sent", extra=facts(error=str(error)))
            return False
        return True

    def _on_message(self, message: Any) -> None:
        self._handlers[type(message)](message)

    def _on_bad_message(self, error: WireError) -> None:
        log.error("a message was refused", extra=facts(error=str(error)))

    def _on_serving(self, serving: Serving) -> None:
        self._site.report(serving)
        self._report_calls()

    def _on_packs(self, packs: Packs) -> None:
        self._site.packs_loaded = packs

    def _on_worker_lost(self, message: WorkerLost) -> None:
        inbox = self._dispatcher.worker_lost(message.worker)
        if inbox is not None and (outbox := self._outboxes.pop(inbox, None)):
            outbox.close()

    def _on_stop(self, _message: Stop) -> None:
        self._dispatcher.fail_all(stopping())
        self._server.should_exit = True

    def _ask_drain(self, draining: bool) -> None:
        self._member.tell(DrainRequest(self._member.name, draining))

    def _report_calls(self) -> None:
        """While the server stops: how many calls it still owes an answer."""
        if not self._site.serving.stopping:
            return
        calls = len(self._site.owed)
        if calls != self._told:
            self._told = calls
            self._member.tell(InFlight(self._member.name, calls))


def use_all_descriptors() -> None:
    """Raise the soft limit of open files to the hard one: every idle connection takes a descriptor."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def serve(member: Member, setup: FrontendSetup) -> None:
    """Run the frontend until it is stopped."""
    use_all_descriptors()
    gc.freeze()  # what the imports made lives for ever: keep it out of every collection
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(member, setup))


async def _run(member: Member, setup: FrontendSetup) -> None:
    await Frontend(member, setup).run()
