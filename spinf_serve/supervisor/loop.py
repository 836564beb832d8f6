"""The supervisor's loop: hand out set-ups and state, watch, replace, restart, drain. Runs in the main thread."""

import dataclasses
import logging
import signal
import socket
import time
from collections.abc import Sequence
from typing import Any

from spinf_serve import logs
from spinf_serve.config import ServedModel
from spinf_serve.logs import facts
from spinf_serve.plan import EngineInfo
from spinf_serve.settings import Settings
from spinf_serve.snapshots import describe
from spinf_serve.supervisor import exit_codes
from spinf_serve.supervisor.pack_loading import PackLoading
from spinf_serve.supervisor.process import Process, death_of
from spinf_serve.supervisor.resolution import Resolution
from spinf_serve.supervisor.restarts import ENGINE_CRASHES, FAILED_STARTS, CrashWindow, Replacements
from spinf_serve.supervisor.rundir import RunDir
from spinf_serve.supervisor.signals import STOP, Signals
from spinf_serve.supervisor.stop import stop_processes
from spinf_serve.wire.engine import EngineSetup, WorkerGone
from spinf_serve.wire.errors import VersionMismatch, WireError
from spinf_serve.wire.frontend import FrontendSetup, Packs, Serving, WorkerLost
from spinf_serve.wire.preprocess import Peers, PreprocessSetup
from spinf_serve.wire.queues import Inbox, close_context
from spinf_serve.wire.registry import FOR_SUPERVISOR
from spinf_serve.wire.supervisor import (
    Beat,
    ChildReady,
    Degraded,
    DrainRequest,
    EngineStats,
    Fatal,
    Hello,
    InFlight,
    Progress,
)

log = logging.getLogger(__name__)

TICK_S = 0.1
# Wrappers such as timeout(1) signal the process and its group: the two arrive within a millisecond and mean one stop.
ONE_STOP_S = 0.03
GAP_S = 2.0
"""A loop turn that took longer was not ours to spend: the whole group was stopped, or the machine was."""
LAST_WORDS_S = 0.3
"""For the last message of a child that ended by itself to arrive after its death was seen."""


class Supervisor:
    """Owns the processes and the serving state, and no request."""

    def __init__(self, settings: Settings, run_dir: RunDir, sockets: Sequence[socket.socket], signals: Signals) -> None:
        self._settings = settings
        self._run_dir = run_dir
        self._sockets = list(sockets)
        self._signals = signals
        self._inbox = Inbox(run_dir.control, FOR_SUPERVISOR)
        self._choice = settings.choice()
        self._described = describe(self._choice)
        self._resolution = Resolution(self._choice)
        self._pack_loading = PackLoading(settings.pack_settings(self._described))
        self._packs: Packs | None = None
        self._model: ServedModel | None = None
        self._processes: dict[str, Process] = {}
        self._due: list[tuple[float, str]] = []
        self._serving = Serving()
        self._stats: EngineStats | None = None  # the last of the engine that runs, for a frontend that comes later
        self._engine_crashes = CrashWindow(*ENGINE_CRASHES, first_s=0.5, most_s=30.0)
        self._replacements = {
            "frontend": Replacements(FAILED_STARTS, first_s=0.5, most_s=5.0),
            "preprocess": Replacements(max(FAILED_STARTS, 2 * settings.preprocess_workers), first_s=0.5, most_s=5.0),
        }
        self._exit_code: int | None = None
        self._reason = ""
        self._stop_name, self._stop_began = "", 0.0
        self._stop_deadline = 0.0
        self._calls: int | None = None  # the frontend's last count of calls in flight, while stopping
        self._turn = time.monotonic()

    @property
    def resolving(self) -> bool:
        """A snapshot is still being prepared in a thread."""
        return self._resolution.running

    def run(self) -> int:
        """Serve until the end; every child is dead when this returns the exit code."""
        try:
            for role in ("frontend", "engine", *["preprocess"] * self._settings.preprocess_workers):
                self._start(role)
            while self._exit_code is None:
                self._inbox.poll(TICK_S, self._signals.fd)
                self._turn_once(time.monotonic())
            return self._exit_code
        finally:
            self._shut_down()

    def _turn_once(self, now: float) -> None:
        self._forgive_gap(now)
        self._take_signals(now)
        self._take_messages(now)
        self._take_resolution(now)
        self._take_packs(now)
        self._reap(now)
        self._watch(now)
        self._start_due(now)
        self._advance_stop(now)

    def _forgive_gap(self, now: float) -> None:
        gap = now - self._turn
        self._turn = now
        if gap > GAP_S:
            for process in self._processes.values():
                process.forgive(gap)

    # Processes

    def _of(self, role: str) -> list[Process]:
        return [process for process in self._processes.values() if process.role == role]

    def _one(self, role: str) -> Process | None:
        return next(iter(self._of(role)), None)

    def _start(self, role: str) -> None:
        fds = [opened.fileno() for opened in self._sockets] if role == "frontend" else []
        process = Process(role, self._run_dir, time.monotonic(), fds)
        self._processes[process.name] = process

    def _start_due(self, now: float) -> None:
        due = [role for at, role in self._due if at <= now]
        self._due = [(at, role) for at, role in self._due if at > now]
        for role in due:
            self._start(role)

    def _set_up(self, process: Process, now: float) -> None:
        """Send the child its slice, once it said hello and what it needs is known: the model, to preprocess the packs.

        The frontend answers before that.
        """
        if process.set_up or not process.inbox or (self._model is None and process.role != "frontend"):
            return
        if process.role == "preprocess" and self._packs is None:
            return
        settings = self._settings
        model = self._model or self._described
        process.set_up = True
        process.moved(now)
        if process.role == "frontend":
            if self._stats is not None:
                process.send(self._stats)  # before its set-up: there when HTTP is served
            listeners = tuple(opened.fileno() for opened in self._sockets)
            config = settings.frontend_config(model)
            process.send(FrontendSetup(config, settings.log_format, listeners, self._serving))
            if self._packs is not None:
                process.send(self._packs)
        elif process.role == "preprocess":
            assert self._packs is not None
            prepared = dataclasses.replace(settings.preprocess_config(model), pack_files=self._packs.files)
            process.send(PreprocessSetup(prepared, settings.log_format, self._peers()))
        else:
            process.send(EngineSetup(settings.engine_config(model), settings.log_format))

    def _take_resolution(self, now: float) -> None:
        if self._model is not None or not self._resolution.done:
            return
        if self._resolution.refusal is not None:
            self._give_up(exit_codes.FAILED, self._resolution.refusal)
            return
        self._model = self._resolution.model
        assert self._model is not None
        self._publish(revision=self._model.revision)
        for process in list(self._processes.values()):
            self._set_up(process, now)

    def _take_packs(self, now: float) -> None:
        if self._packs is not None or not self._pack_loading.done:
            return
        if self._pack_loading.refusal is not None:
            self._give_up(exit_codes.FAILED, self._pack_loading.refusal)
            return
        self._packs = self._pack_loading.packs
        assert self._packs is not None
        frontend = self._one("frontend")
        if frontend is not None and frontend.set_up:
            frontend.send(self._packs)
        for process in list(self._processes.values()):
            self._set_up(process, now)

    # Messages

    def _take_messages(self, now: float) -> None:
        while True:
            try:
                for message in self._inbox.take():
                    self._handle(message, now)
                return
            except VersionMismatch as error:
                self._give_up(exit_codes.FAILED, f"{error}: two versions of spinf-serve are mixed up here")
            except WireError as error:
                log.error("a message was refused", extra=facts(error=str(error)))

    def _handle(self, message: Any, now: float) -> None:
        process = self._processes.get(message.sender)
        if process is None:
            return  # of a child that is already buried
        match message:
            case Hello():
                process.hello(message.inbox, now)
                self._set_up(process, now)
            case Beat():
                process.beat(message.busy_s, now)
            case Progress():
                process.moved(now)
                log.info("%s: %s", process.role, message.text)
            case ChildReady():
                self._ready(process, message.info, now)
            case Fatal():
                self._fatal(process, message)
            case EngineStats():
                self._stats = message.without_samples()
                if frontend := self._one("frontend"):
                    frontend.send(message)
            case Degraded():
                self._publish(degraded=message.reason)
                log.error("the engine is degraded", extra=facts(reason=message.reason))
            case DrainRequest():
                self._publish(draining=message.draining)
                log.info("draining" if message.draining else "draining ended")
            case InFlight():
                self._calls = message.calls

    def _ready(self, process: Process, info: EngineInfo | None, now: float) -> None:
        process.became_ready(now)
        log.info("%s is ready", process.name)
        if process.role in self._replacements:
            self._replacements[process.role].ready()
        if process.role == "frontend":
            process.send(self._serving)  # what changed while it started
        if process.role == "engine":
            self._serving = dataclasses.replace(self._serving, info=info)
        if process.role in ("frontend", "engine"):
            self._tell_peers()
        engine = self._one("engine")
        can_serve = engine is not None and engine.ready and any(p.ready for p in self._of("preprocess"))
        if can_serve and self._serving.phase != "ready":
            log.info("ready to serve %s", self._described.id)
            self._publish(phase="ready", live=True, error=None)

    def _fatal(self, process: Process, message: Fatal) -> None:
        process.last_words = message.reason
        if message.curable:
            log.error("%s: %s", process.name, message.reason)
        else:
            self._give_up(exit_codes.FAILED, message.reason)

    def _peers(self) -> Peers:
        frontend, engine = self._one("frontend"), self._one("engine")
        return Peers(
            frontend=frontend.inbox if frontend and frontend.ready else "",
            engine=engine.inbox if engine and engine.ready else "",
        )

    def _tell_peers(self) -> None:
        peers = self._peers()
        for worker in self._of("preprocess"):
            if worker.set_up:
                worker.send(peers)

    def _publish(self, **changes: Any) -> None:
        self._serving = dataclasses.replace(self._serving, **changes)
        frontend = self._one("frontend")
        if frontend is not None and frontend.set_up:
            frontend.send(self._serving)

    # Deaths

    def _watch(self, now: float) -> None:
        for process in self._processes.values():
            if reason := process.overdue(now, self._settings.watchdog):
                log.error("killing a hung process", extra=facts(child=process.name, reason=reason))
                process.kill()

    def _reap(self, now: float) -> None:
        for process in list(self._processes.values()):
            status = process.exit_status()
            if status is None:
                continue
            if status >= 0:
                self._hear_last_words(now)
            del self._processes[process.name]
            process.close()
            if self._exit_code is None:
                self._bury(process, status, now)

    def _hear_last_words(self, now: float) -> None:
        deadline = time.monotonic() + LAST_WORDS_S
        while self._exit_code is None and (left := deadline - time.monotonic()) > 0:
            if self._inbox.poll(left):
                self._take_messages(now)

    def _bury(self, process: Process, status: int, now: float) -> None:
        log.error("%s died", process.name, extra=facts(status=death_of(status)))
        served_s = None if process.ready_since is None else now - process.ready_since
        if process.role == "engine":
            self._engine_died(process, now)
        elif process.role == "preprocess":
            self._publish(workers_lost=self._serving.workers_lost + 1)
            if frontend := self._one("frontend"):
                frontend.send(WorkerLost(process.name))
            if engine := self._one("engine"):
                engine.send(WorkerGone(process.name))
            self._replace(process.role, served_s, now)
        else:
            self._tell_peers()
            if self._stop_deadline:
                self._finish_stop(cut_off=bool(self._calls))
            else:
                self._replace(process.role, served_s, now)

    def _replace(self, role: str, served_s: float | None, now: float) -> None:
        wait_s = self._replacements[role].died(served_s)
        if wait_s is None:
            self._give_up(exit_codes.FAILED, f"the {role} process died again and again before it was ready")
        else:
            self._due.append((now + wait_s, role))

    def _engine_died(self, engine: Process, now: float) -> None:
        self._stats = None
        phase = "restarting" if self._serving.live else "loading"
        error = "the engine is being restarted" if self._serving.live else None
        restarts = self._serving.engine_restarts + 1
        self._publish(phase=phase, error=error, degraded=None, engine_restarts=restarts)
        self._tell_peers()
        wait_s = self._engine_crashes.crashed(now)
        if wait_s is None:
            limit, window_s = ENGINE_CRASHES
            reason = f"the engine crashed {limit} times within {window_s / 60:.0f} minutes"
            last = f", the last time: {engine.last_words}" if engine.last_words else ""
            self._give_up(exit_codes.ENGINE_CRASHED, reason + last)
        elif not self._stop_deadline:
            self._due.append((now + wait_s, "engine"))

    def _give_up(self, code: int, reason: str) -> None:
        if self._exit_code is None:
            self._publish(phase="failed", live=False, error=reason)
            logs.say(f"spinf-serve: {reason}")
            self._exit_code, self._reason = code, "the server failed"

    # Stopping

    def _take_signals(self, now: float) -> None:
        for number in self._signals.take():
            if number == signal.SIGHUP and not self._signals.hangup_stops:
                log.info("SIGHUP is ignored: restart the server to read its settings again")
            elif number in STOP or number == signal.SIGHUP:
                self._stop_signal(signal.Signals(number).name, now)

    def _stop_signal(self, name: str, now: float) -> None:
        if self._stop_deadline:
            if name == self._stop_name and now - self._stop_began < ONE_STOP_S:
                return
            log.warning("%s again: stopping at once", name)
            self._finish_stop(cut_off=bool(self._calls))
            for process in self._processes.values():
                process.kill()
            return
        log.info(
            "%s: no new calls, those in flight may finish", name, extra=facts(seconds=self._settings.drain_timeout)
        )
        self._stop_name, self._stop_began = name, now
        self._stop_deadline = now + self._settings.drain_timeout
        self._publish(stopping=True)

    def _advance_stop(self, now: float) -> None:
        if not self._stop_deadline or self._exit_code is not None:
            return
        frontend = self._one("frontend")
        if frontend is None or not frontend.ready or self._calls == 0:
            self._finish_stop(cut_off=False)
        elif now >= self._stop_deadline:
            self._finish_stop(cut_off=True)

    def _finish_stop(self, *, cut_off: bool) -> None:
        if self._exit_code is None:
            if cut_off:
                log.error("stopping with calls in flight", extra=facts(calls=self._calls))
            self._exit_code = exit_codes.CUT_OFF if cut_off else exit_codes.STOPPED
            self._reason = "the server stopped"

    def _shut_down(self) -> None:
        """Close the public sockets, end every child in order, leave nothing behind."""
        for opened in self._sockets:
            opened.close()
        stop_processes(self._processes.values(), self._reason, self._signals)
        for process in self._processes.values():
            process.close()
        self._inbox.close()
        close_context()
        log.info("stopped", extra=facts(exit=self._exit_code))
