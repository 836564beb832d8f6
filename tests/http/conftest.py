"""Running servers that the HTTP tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.server import ServerProcess


@pytest.fixture(scope="session")
def open_server(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server without tokens. Bodies up to 64 KiB; a body may take 3 s."""
    flags = ("--max-body-bytes", "65536", "--body-timeout", "3", "--max-processed-tokens", "20000")
    with ServerProcess(tiny_checkpoint, tmp_path_factory.mktemp("open"), *flags) as running:
        yield running


@pytest.fixture(scope="session")
def closed_server(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with an access token ("access") and a trusted one ("trusted"), given in the environment; JSON logs."""
    env = {"SPINF_TOKEN": "access", "SPINF_ENGINE_TOKEN": "trusted", "SPINF_LOG_FORMAT": "json"}
    with ServerProcess(tiny_checkpoint, tmp_path_factory.mktemp("closed"), env=env) as running:
        yield running
