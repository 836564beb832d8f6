"""The ordered end of all children: the frontend first, then those it no longer needs. Runs in the supervisor."""

import time
from collections.abc import Iterable

from spinf_serve.supervisor.process import Process
from spinf_serve.supervisor.signals import STOP, Signals
from spinf_serve.wire.child import Stop

FRONTEND_S = 3.0
"""For the frontend to answer what is still open and to close its connections."""
OTHERS_S = 2.0
_POLL_S = 0.02


def stop_processes(processes: Iterable[Process], reason: str, signals: Signals) -> None:
    """Tell the children to leave; kill what has not left in time, or at once when another signal comes."""
    everyone = list(processes)
    frontends = [process for process in everyone if process.role == "frontend"]
    others = [process for process in everyone if process.role != "frontend"]
    for group, limit_s in ((frontends, FRONTEND_S), (others, OTHERS_S)):
        for process in group:
            if process.inbox:
                process.send(Stop(reason))
            else:
                process.kill()  # it cannot hear yet
        deadline = time.monotonic() + limit_s
        while any(process.exit_status() is None for process in group):
            if time.monotonic() > deadline or any(number in STOP for number in signals.take()):
                break
            time.sleep(_POLL_S)
        for process in group:
            process.kill()
    for process in everyone:
        process.wait(timeout_s=10.0)
