"""A server whose weights have yet to come from the Hub: it answers meanwhile, stops at once, and says what failed."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hub import REPO, REVISION, FakeHub, eventually
from tests.support.server import ServerProcess, body_of, command_of, descendants, is_alive

SHARD = "model.safetensors"


@pytest.fixture(scope="module")
def hub(tiny_checkpoint: Path) -> Iterator[FakeHub]:
    with FakeHub({path.name: path.read_bytes() for path in tiny_checkpoint.iterdir()}) as server:
        yield server


def server(hub: FakeHub, tmp_path: Path) -> ServerProcess:
    env = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": "hf_AbCdEfGh", "HF_HUB_OFFLINE": "0"}
    return ServerProcess(Path(REPO), tmp_path, env=env | {"NO_PROXY": "*"}, ready=False, workers=1)


def downloads(running: ServerProcess) -> list[int]:
    return [pid for pid in descendants(running.popen.pid) if "spinf_serve.hub" in command_of(pid)]


def test_it_answers_while_it_downloads_and_serves_after(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults.hold_at[SHARD] = 100_000
    with server(hub, tmp_path) as running:
        assert hub.holding.wait(30)
        eventually(lambda: running.get("/healthz").status_code == 200)  # the frontend has started
        for _ in range(20):
            began = time.monotonic()
            assert running.get("/healthz").status_code == 200
            assert time.monotonic() - began < 1
        refused = running.post(body_of())
        assert refused.status_code == running.get("/readyz").status_code == 503
        assert refused.json()["error"]["code"] == "warming_up"
        hub.go.set()
        running.wait_ready()
        response = running.post(body_of()).json()
        assert response["model"] == REPO
        assert f"the head of its default branch is {REVISION}" in running.log
        assert f"downloading {REPO} at {REVISION}" in running.log
        assert "hf_AbCdEfGh" not in running.log
        assert downloads(running) == []
        assert running.stop() == 0


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_it_stops_at_once_and_leaves_no_download(hub: FakeHub, tmp_path: Path, how: signal.Signals) -> None:
    hub.go.clear()
    hub.holding.clear()
    hub.faults.hold_at[SHARD] = 100_000
    with server(hub, tmp_path) as running:
        assert hub.holding.wait(30)
        (child,) = downloads(running)
        began = time.monotonic()
        running.signal(how)
        assert running.wait() == (0 if how == signal.SIGTERM else -signal.SIGKILL)
        assert time.monotonic() - began < 5
        eventually(lambda: not is_alive(child), seconds=1)
    hub.go.set()


def test_a_failed_download_ends_the_start(hub: FakeHub, tmp_path: Path) -> None:
    hub.go.set()
    hub.faults.status[SHARD] = (403, "GatedRepo")
    with server(hub, tmp_path) as running:
        assert running.wait() == 1
        assert f"spinf-serve: access to {REPO} is restricted (403): accept its terms at" in running.log
        assert "Traceback" not in running.log
    hub.faults.status.clear()
