"""The download process: a job on standard input, events as JSON lines on standard output.

Events: {"note": text}, {"done": bytes, "total": bytes}, and last {"revision": commit} or {"failed": text,
"unreachable": whether the Hub could not be reached at all}. It ends when standard input does: with its parent. It is a
process of its own, so that a server can stop at once whatever the download is doing, and keeps none of its memory.
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
    job = json.loads(sys.stdin.buffer.readline())
    job["only"], job["waits_s"] = tuple(job["only"]), tuple(job["waits_s"])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(BrokenPipeError):
        emit(_run(Job(**job), emit))
    os._exit(0)


def _run(job: Job, emit: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    has_token = False
    try:
        note = lambda text: emit({"note": scrub(text)})  # noqa: E731 - two short reporters side by side
        moved = lambda done, total: emit({"done": done, "total": total})  # noqa: E731
        remote = Remote(job.repo, job.waits_s, note)
        has_token = remote.has_token
        return {"revision": Fetch(job, Report(note, moved), remote).run()}
    except ModuleNotFoundError as error:
        return {"failed": f"{error.name} is not installed: pip install 'spinf-serve[server]'", "unreachable": False}
    except BaseException as error:
        return {
            "failed": explain(error, job.repo, job.revision, _endpoint(), job.cache, has_token),
            "unreachable": is_transient(error),
        }


def _endpoint() -> str:
    from huggingface_hub.constants import ENDPOINT

    return ENDPOINT


def _events(descriptor: int) -> Callable[[dict[str, Any]], None]:
    lock = threading.Lock()

    def emit(event: dict[str, Any]) -> None:
        line = json.dumps(event).encode() + b"\n"
        with lock:
            while line:
                line = line[os.write(descriptor, line) :]

    return emit


def _end_with_parent() -> None:
    while os.read(0, 1024):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
