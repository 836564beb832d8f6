"""What becomes of memory that a CPU pass has freed."""

import ctypes
import os
from functools import cache

# <malloc.h>
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3

_BLOCK = 256 << 20  # bytes; the largest buffer of a pass of 4,096 tokens through the demo has 64 MiB
_KEPT = 1 << 30  # bytes at the end of the heap


@cache
def keep_freed_memory() -> bool:
    """Let the C library keep freed blocks for the next one that is asked for.

    False where it is not glibc, or the environment sets glibc's allocator.

    By itself glibc gives every block over 32 MiB back to the kernel, and gets the next one page by page, each zeroed:
    half a million faults in a pass of 4,096 tokens. It helps the process's first thread most, which runs the passes:
    the heaps of others hold no block over 64 MiB.
    """
    if "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    return bool(library.mallopt(_MMAP_THRESHOLD, _BLOCK) and library.mallopt(_TRIM_THRESHOLD, _KEPT))
