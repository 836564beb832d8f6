"""Fixtures of the engine's tests."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# isort: off
import workers.engine  # noqa: F401 - before torch: it sets how OpenMP waits
import torch

# isort: on

from tests.engine.support import engine_config, load_reference
from workers.engine.engine import ScoringEngine


@pytest.fixture(autouse=True)
def fresh_memory_is_nan() -> Iterator[None]:
    """Fill every fresh buffer with NaN, so that an output left unwritten fails at once."""
    torch.use_deterministic_algorithms(True)  # what torch.utils.deterministic.fill_uninitialized_memory waits for
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def two_threads() -> None:
    """Every test starts with two threads, whatever the one before it set."""
    torch.set_num_threads(2)


@pytest.fixture(scope="session")
def engine(tiny_checkpoint: Path) -> Iterator[ScoringEngine]:
    """An engine on the tiny checkpoint. Tests leave it idle."""
    engine = ScoringEngine.load(engine_config(tiny_checkpoint))
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def reference(tiny_checkpoint: Path) -> Any:
    """transformers' model on the tiny checkpoint."""
    return load_reference(tiny_checkpoint)
