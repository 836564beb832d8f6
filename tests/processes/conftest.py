"""One running server that the tests of this folder share, as long as they leave it serving."""

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.server import ServerProcess


@pytest.fixture(scope="module")
def server(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with the trusted token "trusted"; each test leaves it ready."""
    with ServerProcess(tiny_checkpoint, tmp_path_factory.mktemp("server"), "--trusted-token", "trusted") as running:
        running.client.headers["authorization"] = "Bearer trusted"
        yield running


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """For sockets, whose paths must stay short: what comes before a test's `tmp_path` depends on how tests are run."""
    with tempfile.TemporaryDirectory(prefix="run-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session", autouse=True)
def hangup_by_default() -> Iterator[None]:
    """Under nohup the suite ignores SIGHUP, its servers would inherit that, and then rightly never hear of one."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
