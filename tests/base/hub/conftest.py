"""A small repository, a server that plays the Hub for it, and an environment without the machine's own caches."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from spinf_serve.hub import client, resolve
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
def hub(repository: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """The server, as HF_ENDPOINT."""
    with FakeHub(repository) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server
