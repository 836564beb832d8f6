"""`spinf-serve serve`: bind, make the run directory, run the loop, clean up. Runs in the main thread."""

import logging
import os

from spinf_serve import __version__, logs
from spinf_serve.refusal import StartRefused
from spinf_serve.settings import Settings
from spinf_serve.supervisor import exit_codes
from spinf_serve.supervisor.listen import PortTaken, listen, url_of
from spinf_serve.supervisor.loop import Supervisor
from spinf_serve.supervisor.rundir import RunDir
from spinf_serve.supervisor.signals import Signals

log = logging.getLogger(__name__)


def run_server(settings: Settings) -> int:
    """Serve until a signal or a failure ends it; returns the exit code of cli.md."""
    logs.setup("supervisor", settings.log_format)
    try:
        sockets = listen(settings.host, settings.port)
    except PortTaken as error:
        return refuse(str(error), exit_codes.PORT_TAKEN)
    except StartRefused as error:
        return refuse(str(error), exit_codes.FAILED)
    signals = Signals()
    run_dir = None
    supervisor = None
    try:
        run_dir = RunDir.create(settings.ipc_dir)
        for warning in settings.warnings():
            log.warning(warning)
        urls = ", ".join(url_of(opened) for opened in sockets)
        log.info("spinf-serve %s listens on %s", __version__, urls)
        supervisor = Supervisor(settings, run_dir, sockets, signals)
        code = supervisor.run()
    except StartRefused as error:
        code = refuse(str(error), exit_codes.FAILED)
    finally:
        for opened in sockets:
            opened.close()
        if run_dir is not None:
            run_dir.remove()
        signals.restore()
    if supervisor is not None and supervisor.resolving:
        # The interpreter would wait for the thread's own workers (hashing gigabytes) before it ends.
        logs.settle()
        os._exit(code)
    return code


def refuse(reason: str, code: int) -> int:
    """Print why the server does not (or no longer) run, and return the exit code."""
    logs.say(f"spinf-serve: {reason}")
    return code
