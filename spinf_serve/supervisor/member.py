"""The child's side of the supervisor: identity, handshake, heartbeats, and dying with it. Runs in every child."""

import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from spinf_serve import logs
from spinf_serve.supervisor.rundir import CONTROL, child_socket, owner_pid
from spinf_serve.wire.child import Stop
from spinf_serve.wire.errors import QueueFull, WireError
from spinf_serve.wire.queues import Inbox, Outbox, close_context, ipc_address
from spinf_serve.wire.registry import FOR_ROLE
from spinf_serve.wire.supervisor import Beat, Fatal, Hello

log = logging.getLogger(__name__)

BEAT_S = 0.5
_PR_SET_PDEATHSIG = 1
_SETUP_POLL_S = 0.5

Message = TypeVar("Message")


class Stopped(Exception):
    """The supervisor told this child to leave."""


class CannotStart(Exception):
    """Nothing that a restart could cure; the message is for the person who started the server."""


class CannotStartNow(Exception):
    """What may be over when the process is started again; the message is for the log, and quotes no request."""


class Progress:
    """What the main loop does, for the heartbeat thread. `enter`/`leave` around a step, or `tick` in a free loop."""

    def __init__(self) -> None:
        self._since: float | None = None

    def enter(self) -> None:
        """A step begins (or, in a loop that is always inside one, the next)."""
        self._since = time.monotonic()

    tick = enter

    def leave(self) -> None:
        """The loop waits for work."""
        self._since = None

    @property
    def busy_s(self) -> float:
        since = self._since
        return 0.0 if since is None else time.monotonic() - since


class Member:
    """This process as a child: its inbox, its outbox to the supervisor, its heartbeat."""

    def __init__(self, role: str, run_dir: Path) -> None:
        self.name = f"{role}-{os.getpid()}"
        self.progress = Progress()
        self._supervisor_pid = owner_pid(run_dir)
        self._die_with_supervisor()
        self._control = ipc_address(str(run_dir / CONTROL))
        self.supervisor = Outbox(self._control)
        self.inbox = Inbox(child_socket(run_dir, role, os.getpid()), FOR_ROLE[role])
        self.waiting: deque[Any] = deque()  # came before the set-up was done
        self._stop_beating = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    @classmethod
    def join(cls, role: str) -> "Member":
        """First act of a child's main: ignore terminal signals, die with the supervisor, say hello."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
        logs.setup(role, "text")
        if len(sys.argv) != 2:
            sys.exit(f"workers.{role} is started by spinf-serve serve: its one argument is the run directory")
        member = cls(role, Path(sys.argv[1]))
        member.supervisor.send(Hello(member.name, role, os.getpid(), member.inbox.address))
        member._heart.start()
        return member

    def _die_with_supervisor(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # Linux only; the heartbeat thread looks too
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        self._leave_if_orphaned()  # it may have died before the call above

    def _leave_if_orphaned(self) -> None:
        if os.getppid() != self._supervisor_pid:
            os._exit(1)

    def _beat(self) -> None:
        outbox = Outbox(self._control)
        while not self._stop_beating.wait(BEAT_S):
            self._leave_if_orphaned()
            with contextlib.suppress(WireError):
                outbox.send(Beat(self.name, self.progress.busy_s))
        outbox.close()

    def set_up(self, expected: type[Message]) -> Message:
        """Wait for the set-up message. Raises Stopped, or WireError for a message of another protocol version."""
        while True:
            self.inbox.poll(_SETUP_POLL_S)
            for message in self.inbox.take():
                if isinstance(message, Stop):
                    raise Stopped
                if isinstance(message, expected):
                    return message
                self.waiting.append(message)

    def tell(self, message: Any) -> None:
        """Send to the supervisor; a full queue is logged and dropped: its owner is about to end this process."""
        try:
            self.supervisor.send(message)
        except QueueFull as error:
            log.error("message not sent", extra=logs.facts(error=str(error)))

    def fail(self, reason: str, *, curable: bool) -> None:
        """Last words before this process ends."""
        self.tell(Fatal(self.name, reason, curable))

    def leave(self) -> None:
        """Last act: stop the heartbeat, let the last words out, close the sockets."""
        self._stop_beating.set()
        if self._heart.is_alive():
            self._heart.join(timeout=2)
        self.inbox.close()
        self.supervisor.close(linger_s=1.0)
        close_context(linger_s=1.0)


def run_child(role: str, main: Callable[[Member], None]) -> int:
    """The life of a child around `main`; returns its exit status. Whatever ends it early is told to the supervisor."""
    member = Member.join(role)
    try:
        main(member)
    except Stopped:
        return 0
    except (CannotStart, WireError) as error:
        member.fail(str(error), curable=False)
        return 1
    except CannotStartNow as error:
        member.fail(str(error), curable=True)
        return 1
    except Exception as error:
        log.exception("the process cannot go on")
        member.fail(f"ended by {type(error).__name__}", curable=True)
        return 1
    finally:
        member.leave()
    return 0
