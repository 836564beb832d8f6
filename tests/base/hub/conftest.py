"""A small repository, a server that plays the Hub for it, and an environment without the machine's own caches."""

import os
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from spinf_serve.hub import client, resolve
from spinf_serve.hub.__main__ import run
from spinf_serve.hub.fetch import Job
from tests.support.hub import FakeHub
from tests.support.tiny import make_tiny_checkpoint

TOKEN = "hf_AbCdEfGhIjKlMnOpQrStUv"


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Files of a served family: two shards, tokenizer, and things that nobody needs."""
    directory = make_tiny_checkpoint(tmp_path_factory.mktemp("hub") / "tiny", shards=2)
    files = {path.name: path.read_bytes() for path in sorted(directory.iterdir())}
    unneeded = ("README.md", ".gitattributes", "pytorch_model.bin", "original/model.safetensors", "onnx/config.json")
    return files | dict.fromkeys(unneeded, b"not needed") | {"tokenizer.model": b"\x00sentencepiece"}


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches below `tmp_path`, no token, no Hub, short waits."""
    for name in list(os.environ):
        if name.startswith(("HF_", "HUGGING", "SPINF_")) or name in ("XDG_CACHE_HOME", "TRANSFORMERS_OFFLINE"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "2")
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr(client, "RETRY_WAITS_S", (0.05, 0.05))
    resolve.head.cache_clear()


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Downloads run in a thread here: a process takes a second to import what it needs."""

    def events(job: dict[str, Any]) -> Generator[dict[str, Any]]:
        queue: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        confirmed = threading.Event()

        def work() -> None:
            queue.put(run(Job(**job), queue.put, confirmed))
            queue.put(None)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        while (event := queue.get()) is not None:
            yield event
            if "config" in event:
                confirmed.set()
        thread.join()

    monkeypatch.setattr(client, "_events", events)


@pytest.fixture
def hub(repository: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """The server, as HF_ENDPOINT."""
    with FakeHub(repository) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server
