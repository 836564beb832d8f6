"""The download process: killed at any point, orphaned, silent about secrets."""

import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from spinf_serve.completeness import SnapshotError
from spinf_serve.hub import cache, client
from spinf_serve.progress import size_text
from tests.base.hub.conftest import TOKEN
from tests.support.hub import REPO, REVISION, FakeHub, eventually
from tests.support.server import ROOT, command_of, descendants, is_alive

SHARDS = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]


def downloads() -> list[int]:
    """Pids of the running download processes of this test."""
    return [pid for pid in descendants(os.getpid()) if "spinf_serve.hub" in command_of(pid)]


def assert_whole(repository: dict[str, bytes]) -> None:
    found = cache.find(REPO, REVISION)
    assert found.directory is not None, found.skipped
    wanted = {name: data for name, data in repository.items() if cache.wanted(name)}
    assert {path.name: path.read_bytes() for path in found.directory.iterdir()} == wanted


def test_a_download_in_its_own_process(hub: FakeHub, repository: dict[str, bytes]) -> None:
    notes: list[str] = []
    moves: list[tuple[int, int]] = []
    assert client.fetch(REPO, REVISION, notes.append, lambda *move: moves.append(move)) == REVISION
    assert_whole(repository)
    wanted = {name: data for name, data in repository.items() if cache.wanted(name)}
    assert notes == [
        f"downloading {REPO} at {REVISION}: {len(wanted)} files, {size_text(sum(map(len, wanted.values())))}"
    ]
    assert moves[-1][0] == moves[-1][1]
    assert downloads() == []


@pytest.mark.parametrize(
    ("name", "offset"),
    [("config.json", 0), ("tokenizer.json", 16_384), (SHARDS[0], 0), (SHARDS[1], 200_000)],
)
def test_a_download_killed_at_any_point_is_recovered_from(
    hub: FakeHub, repository: dict[str, bytes], name: str, offset: int
) -> None:
    hub.faults.hold_at[name] = offset
    failures: list[str] = []

    def run() -> None:
        try:
            client.fetch(REPO, REVISION, lambda _note: None)
        except SnapshotError as error:
            failures.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    assert hub.holding.wait(20)
    part = cache.repo_folder(cache.hub_cache(), REPO) / "blobs" / f"{hub.etag(name)}.incomplete"
    eventually(lambda: part.exists() and part.stat().st_size >= offset - 8192)
    os.kill(downloads()[0], signal.SIGKILL)
    thread.join()
    assert len(failures) == 1
    assert "was killed" in failures[0]
    assert cache.find(REPO, REVISION).directory is None, "an incomplete snapshot counted"

    hub.go.set()
    before = part.stat().st_size
    client.fetch(REPO, REVISION, lambda _note: None)
    assert_whole(repository)
    assert hub.got(name)[-1].range == (f"bytes={before}-" if before else None)
    lost_on_the_way = 16_384
    assert hub.sent[name] <= len(repository[name]) + offset - before + lost_on_the_way
    assert not list(cache.hub_cache().rglob("*.incomplete"))


def test_it_ends_with_its_parent(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPINF_TOKEN", "server-sekrit")
    hub.faults.hold_at[SHARDS[0]] = 1000
    code = f"from spinf_serve.hub import client; client.fetch({REPO!r}, {REVISION!r}, print)"
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        assert hub.holding.wait(20)
        (child,) = [pid for pid in descendants(parent.pid) if "spinf_serve.hub" in command_of(pid)]
        assert b"server-sekrit" not in Path(f"/proc/{child}/environ").read_bytes()
    finally:
        parent.kill()
        parent.wait()
    eventually(lambda: not is_alive(child), seconds=2)


def test_it_ends_with_whoever_stops_listening(hub: FakeHub) -> None:
    hub.faults.pace_s = 0.05

    class Enough(Exception):
        pass

    def stop(_done: int, _total: int) -> None:
        raise Enough

    with pytest.raises(Enough):
        client.fetch(REPO, REVISION, lambda _note: None, stop)
    assert downloads() == []


@pytest.mark.parametrize("fault", ["none", "401", "storage", "nothing there", "odd token"])
def test_secrets_never_come_out(
    repository: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    fault: str,
) -> None:
    """Not the token, not the password of an address, not a signature: at debug level, in notes, errors and files."""
    caplog.set_level(logging.DEBUG)
    for name, value in {"HF_DEBUG": "1", "HF_HUB_VERBOSITY": "debug", "SPINF_TOKEN": "server-sekrit"}.items():
        monkeypatch.setenv(name, value)
    token = TOKEN if fault != "odd token" else f"{TOKEN}\x01x"
    monkeypatch.setenv("HF_TOKEN", token)
    said: list[str] = []
    with FakeHub(repository) as storage, FakeHub(repository, storage=storage.url) as hub:
        address = hub.url.replace("//", "//user:sekrit@")
        monkeypatch.setenv("HF_ENDPOINT", address if fault != "nothing there" else "http://user:sekrit@127.0.0.1:9")
        if fault == "401":
            hub.faults.status["/tree/"] = (401, "")
        if fault == "storage":
            storage.faults.status["/stored/"] = (403, "")
        try:
            client.fetch(REPO, REVISION, said.append)
        except SnapshotError as error:
            said.append(f"{error!s} {error!r}")
    assert said
    assert fault == "none" or "SnapshotError" in said[-1] or "Unreachable" in said[-1]
    output = "\n".join([*said, caplog.text, *capfd.readouterr()])
    files = b"\n".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    for secret in (token, TOKEN, TOKEN[3:], "sekrit"):
        assert secret not in output
        assert secret.encode() not in files


def test_without_huggingface_hub_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "huggingface_hub.py").write_text("raise ModuleNotFoundError(name='huggingface_hub')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    with pytest.raises(SnapshotError, match=r"huggingface_hub is not installed: pip install 'spinf-serve\[server\]'"):
        client.fetch(REPO, REVISION, lambda _note: None)


def test_without_a_home_the_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", "~nobody-of-this-name/hf")
    with pytest.raises(SnapshotError, match="set HF_HOME"):
        client.fetch(REPO, REVISION, lambda _note: None)
