"""What the tests of this folder do to a running server."""

import os
import signal
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from tests.support.server import ServerProcess, wait_for


def in_background[T](call: Callable[[], T]) -> Future[T]:
    """Run a call in a thread of its own."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(call)
    pool.shutdown(wait=False)
    return future


def replaced(server: ServerProcess, role: str, old: set[int]) -> list[int]:
    """The children of a role once none of the old ones is left and as many new ones are there."""

    def probe() -> list[int] | None:
        now = server.children(role)
        return now if len(now) >= len(old) and not old & set(now) else None

    return wait_for(probe, f"a new {role}")


def wait_workers(server: ServerProcess, count: int) -> None:
    """Until that many workers are there and all of them can work."""

    def probe() -> bool:
        workers = server.children("preprocess")
        return len(workers) == count and all(f"preprocess-{pid} is ready" in server.log for pid in workers)

    wait_for(probe, f"{count} workers")


def hold_engine(server: ServerProcess) -> Callable[[], None]:
    """Stop the engine, so that calls stay in flight; the result lets it go on."""
    engine = server.child("engine")
    os.kill(engine, signal.SIGSTOP)
    return lambda: os.kill(engine, signal.SIGCONT)


def wait_in_flight(server: ServerProcess, count: int) -> None:
    wait_for(lambda: server.metric("spinf_requests_running") == count, f"{count} calls in flight")
