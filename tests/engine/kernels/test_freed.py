"""Freed memory is used again: without a fault, unless somebody set the allocator otherwise."""

import ctypes
import os
import resource
import subprocess
import sys

import pytest

from workers.engine.kernels import freed

pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="glibc alone")

_SETTINGS = ("MALLOC_", "GLIBC_TUNABLES")

_FAULTS = f"""
import resource
import workers.engine, torch
from workers.engine.kernels.pieces import each

def blocks(count):
    for _ in range(count):
        torch.ones(70 << 18)  # 70 MiB

each(len, [[]])
blocks(12)  # until the heap has found a place for them
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
blocks(8)
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * {resource.getpagesize()} >> 20)
"""


def _faulted(**settings: str) -> int:
    """MiB of pages that eight more blocks of 70 MiB took."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(_SETTINGS)} | settings
    run = subprocess.run([sys.executable, "-c", _FAULTS], env=environment, capture_output=True, text=True, check=True)
    return int(run.stdout)


def test_blocks_are_used_again() -> None:
    assert _faulted() < 100


def test_the_environment_has_its_way() -> None:
    assert _faulted(MALLOC_ARENA_MAX="8") > 500


def test_another_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(_SETTINGS):
            monkeypatch.delenv(name)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    assert not freed.keep_freed_memory.__wrapped__()
