"""Fixtures for every test folder."""

from pathlib import Path

import pytest

from tests.support.tiny import make_tiny_checkpoint


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Gemma 3 snapshot (3 layers, window 16), written once for the session. Treat it as read-only."""
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "snapshot")
