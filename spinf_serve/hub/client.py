"""Runs the download process and passes on what it says. Used by whatever resolves a snapshot, in any thread."""

import atexit
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import IO, Any

from spinf_serve.completeness import SnapshotError
from spinf_serve.hub.cache import hub_cache, repo_folder

RETRY_WAITS_S = (1.0, 2.0, 4.0, 8.0)
STREAMS = 4


class Unreachable(SnapshotError):
    """The Hub could not be reached, or is down."""


def fetch(
    repo: str,
    revision: str | None,
    note: Callable[[str], None],
    moved: Callable[[int, int], None] = lambda _done, _total: None,
    check_config: Callable[[Path], None] = lambda _directory: None,
    only: tuple[str, ...] = (),
) -> str:
    """Download what is missing of a repository at a commit (None: the head of its default branch) to the Hub cache.

    `note` gets sentences, `moved` the bytes that are here and in all; `check_config` gets the directory with
    config.json before anything else is downloaded, and may raise; `only` names the files that are enough. Returns the
    commit. Raises `SnapshotError` with what to do, `Unreachable` where the network is the reason.
    """
    cache = hub_cache()
    if str(cache).startswith("~"):
        raise SnapshotError("this user has no home directory to keep weights in: set HF_HOME")
    job = {
        "repo": repo,
        "revision": revision,
        "cache": str(cache.absolute()),
        "endpoint": os.environ.get("HF_ENDPOINT", "").rstrip("/") or None,
        "only": only,
        "streams": STREAMS,
        "waits_s": RETRY_WAITS_S,
    }
    with contextlib.closing(_events(job)) as events:
        for event in events:
            if "note" in event:
                note(event["note"])
            elif "done" in event:
                moved(event["done"], event["total"])
            elif "config" in event:
                check_config(Path(event["config"]))
            elif "revision" in event:
                return str(event["revision"])
            else:
                raise (Unreachable if event["unreachable"] else SnapshotError)(event["failed"])
    raise SnapshotError(
        f"the download of {repo} was killed; what was downloaded is kept, and the next start goes on from there"
    )


def _events(job: dict[str, Any]) -> Generator[dict[str, Any]]:
    """What the process says, line by line; taking the next line tells it to go on. It is dead once this is closed."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "spinf_serve.hub"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # a library's debug output may quote requests
        env=_environment(),
        start_new_session=True,  # Ctrl-C is for us to take
    )
    atexit.register(process.kill)  # a thread that waits here does not see its process end
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        _tell(process.stdin, json.dumps(job))
        for line in process.stdout:
            if not line.endswith(b"\n"):
                return  # it was killed in the middle of a line
            event = json.loads(line)
            yield event
            if "config" in event:
                _tell(process.stdin, "go on")
    finally:
        process.kill()
        process.wait()
        atexit.unregister(process.kill)
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.stdout.close()


def _tell(stdin: IO[bytes], line: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # it died: the end of its output says so
        stdin.write(line.encode() + b"\n")
        stdin.flush()


def _environment() -> dict[str, str]:
    """Ours without the server's own variables (its access tokens), and without telemetry."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SPINF_")}
    return {"HF_HUB_DISABLE_TELEMETRY": "1", **kept}


def snapshot_dir(repo: str, revision: str) -> Path:
    """Where `fetch` puts the files of a commit."""
    return repo_folder(hub_cache(), repo) / "snapshots" / revision
