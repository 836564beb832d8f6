"""One child as the supervisor sees it: started, spoken to, watched, killed. Runs in the supervisor's main thread."""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from spinf_serve.logs import facts
from spinf_serve.supervisor.rundir import RunDir
from spinf_serve.supervisor.signals import blocked_for_child
from spinf_serve.wire.errors import WireError
from spinf_serve.wire.queues import Outbox

log = logging.getLogger(__name__)

HELLO_S = 60.0
"""For a child to say hello: interpreter start and its first imports, on a cold and busy disk."""
LOADING_SILENCE_S = {"frontend": 30.0, "preprocess": 30.0, "engine": 120.0}
"""Between two heartbeats before ready: loading a shared library holds the interpreter lock for seconds."""
LOADING_S = {"frontend": 120.0, "preprocess": 300.0, "engine": 1800.0}
"""Between hello (or the last progress message) and ready."""
SILENCE_S = {"frontend": 5.0, "preprocess": 5.0, "engine": 10.0}
"""Between two heartbeats of a ready child: longer, and it counts as dead."""
STUCK_S = {"frontend": 10.0, "preprocess": 60.0}
"""In one step of the main loop of a ready child; the engine has its watchdog."""
_KEPT = ("SPINF_CACHE_DIRS",)


class Process:
    """A started child. `name` is `<role>-<pid>`, as the child calls itself."""

    def __init__(self, role: str, run_dir: RunDir, now: float, pass_fds: Sequence[int] = ()) -> None:
        self.role = role
        with blocked_for_child():
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", f"workers.{role}", str(run_dir.path)],
                stdin=subprocess.DEVNULL,
                pass_fds=tuple(pass_fds),
                env=child_environment(),
            )
        self.name = f"{role}-{self.pid}"
        self.inbox = ""
        self.ready_since: float | None = None
        self.set_up = False
        self.busy_s = 0.0
        self.last_words = ""  # why it ends, where it could say so
        self._killed = False
        self._outbox: Outbox | None = None
        self._moved = now  # the last step of its start
        self._heard = now
        log.info("started %s", self.name)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def ready(self) -> bool:
        return self.ready_since is not None

    def hello(self, inbox: str, now: float) -> None:
        """It lives and listens at `inbox`."""
        self.inbox = inbox
        self._outbox = Outbox(inbox)
        self._moved = self._heard = now

    def moved(self, now: float) -> None:
        """It reported progress of its start."""
        self._moved = self._heard = now

    def beat(self, busy_s: float, now: float) -> None:
        """A heartbeat came."""
        self._heard = now
        self.busy_s = busy_s

    def became_ready(self, now: float) -> None:
        """It can work."""
        self.ready_since = self._moved = self._heard = now
        self.busy_s = 0.0

    def forgive(self, seconds: float) -> None:
        """The supervisor itself was held up (a stopped process group, a paused machine): nobody could be heard."""
        self._moved += seconds
        self._heard += seconds

    def send(self, message: Any) -> None:
        """Queue a message for it; one that does not come through is logged, and the watch deals with a stuck child."""
        if self._outbox is None:
            return
        try:
            self._outbox.send(message)
        except WireError as error:
            log.error("message not sent", extra=facts(child=self.name, error=str(error)))

    def overdue(self, now: float, watchdog_s: float) -> str | None:
        """Why this child counts as hung, or None. `watchdog_s` bounds one engine pass, 0 = no bound.

        Who was killed already is not asked again: giving its memory back takes a large process a while.
        """
        if self._killed:
            return None
        if self._outbox is None:
            return f"no hello within {HELLO_S:.0f} s" if now - self._moved > HELLO_S else None
        silence = (SILENCE_S if self.ready else LOADING_SILENCE_S)[self.role]
        if now - self._heard > silence:
            return f"no heartbeat for {silence:.0f} s"
        if not self.ready:
            limit = LOADING_S[self.role]
            late = self.set_up and now - self._moved > limit
            return f"its start did not move for {limit:.0f} s" if late else None
        stuck = STUCK_S.get(self.role, watchdog_s)
        if stuck and self.busy_s > stuck:
            return f"stuck in one step for {self.busy_s:.0f} s"
        return None

    def exit_status(self) -> int | None:
        """Its exit status once it is dead (reaped here), negative for a signal; None while it lives."""
        return self._popen.poll()

    def kill(self) -> None:
        """SIGKILL: it also ends a stopped process. The death is noticed by `exit_status`."""
        if self._popen.returncode is None:
            self._killed = True
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout_s: float) -> bool:
        """Wait for its death; False when it still lives."""
        try:
            self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """Drop the way to it."""
        if self._outbox is not None:
            self._outbox.close()
            self._outbox = None


def child_environment() -> dict[str, str]:
    """The environment without our own variables: settings and tokens reach a child in the handshake only."""
    return {name: value for name, value in os.environ.items() if name in _KEPT or not name.startswith("SPINF_")}


def death_of(status: int) -> str:
    """Words for an exit status."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
