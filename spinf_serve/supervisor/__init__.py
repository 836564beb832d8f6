"""The supervisor: spawns, watches, restarts and drains the three kinds of processes; owns no request."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spinf_serve.settings import Settings


def run(settings: "Settings") -> int:
    """Serve until a signal or a failure ends it; returns the exit code of cli.md. Call it from the main thread."""
    from spinf_serve.supervisor.run import run_server  # needs pyzmq, which the base package does not

    return run_server(settings)
