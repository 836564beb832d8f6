"""Fixtures of the tests that need a GPU."""

from collections.abc import Iterator

import pytest

# isort: off
import workers.engine  # noqa: F401 - before torch: it sets how OpenMP waits
import torch

# isort: on


@pytest.fixture
def fresh_memory_is_nan() -> Iterator[None]:
    """Fill every fresh buffer with NaN, so that an output left unwritten fails at once.

    For kernels alone: library products refuse to run in torch's deterministic mode, which this needs.
    """
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
