"""The download process: a job on standard input, events as JSON lines on standard output.

Events: {"note": text}, {"done": bytes, "total": bytes}, {"config": directory with config.json}, after which it waits
for a line, and last {"revision": commit} or {"failed": text, "unreachable": whether the Hub could not be reached}. It
ends when standard input does: with its parent. It is a process of its own, so that a server can stop at once whatever
the download is doing, and keeps none of its memory.
"""

import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from spinf_serve.hub.failures import explain, is_transient, scrub
from spinf_serve.hub.fetch import Fetch, Job, Report
from spinf_serve.hub.remote import Remote


def main() -> None:
    """Run one job and end, without waiting for any thread."""
    emit = _events(os.dup(1))
    os.dup2(2, 1)  # what a library prints is no event
    job = Job(**json.loads(sys.stdin.buffer.readline()))
    confirmed = threading.Event()
    threading.Thread(target=_listen, args=(confirmed,), daemon=True).start()
    with contextlib.suppress(BrokenPipeError):
        emit(run(job, emit, confirmed))
    os._exit(0)


def run(job: Job, emit: Callable[[dict[str, Any]], None], confirmed: threading.Event) -> dict[str, Any]:
    """Do the job; returns the last event."""

    def config_here(directory: str) -> None:
        emit({"config": directory})
        confirmed.wait()

    report = Report(
        note=lambda text: emit({"note": scrub(text)}),
        moved=lambda done, total: emit({"done": done, "total": total}),
        config_here=config_here,
    )
    endpoint = job.endpoint or "https://huggingface.co"
    has_token = False
    try:
        remote = Remote(job.repo, job.waits_s, report.note, job.endpoint)
        has_token = remote.has_token
        return {"revision": Fetch(job, report, remote).run()}
    except ModuleNotFoundError as error:
        return {"failed": f"{error.name} is not installed: pip install 'spinf-serve[server]'", "unreachable": False}
    except BaseException as error:
        return {
            "failed": explain(error, job.repo, job.revision, endpoint, job.cache, has_token),
            "unreachable": is_transient(error),
        }


def _events(descriptor: int) -> Callable[[dict[str, Any]], None]:
    lock = threading.Lock()

    def emit(event: dict[str, Any]) -> None:
        line = json.dumps(event).encode() + b"\n"
        with lock:
            while line:
                line = line[os.write(descriptor, line) :]

    return emit


def _listen(confirmed: threading.Event) -> None:
    """Take the go-ahead, and end with the parent."""
    while os.read(0, 1024):
        confirmed.set()
    os._exit(1)


if __name__ == "__main__":
    main()
