"""What a failed pass means: for its caller, and for the device."""

import errno
import logging
from typing import TypeGuard

import torch

from spinf_serve.protocol.errors import RequestError

log = logging.getLogger(__name__)

_OUT_OF_MEMORY = ("allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def is_out_of_memory(error: Exception) -> bool:
    """Python's, torch's, the libraries' and the CPU allocator's ways to say that memory is short."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)
    )


def is_unwritable(error: Exception) -> TypeGuard[OSError]:
    """Whether a file found no room, or a file system that takes none: nobody changes that between two starts."""
    return isinstance(error, OSError) and error.errno in _UNWRITABLE


def request_error(error: Exception) -> RequestError:
    """What the caller is told: the request is too large for the memory, or an error without its details."""
    if is_out_of_memory(error):
        log.error("a request did not fit the memory: %s", error)
        return RequestError("request_too_large", "the request did not fit the engine's memory")
    log.error("a request failed in the engine", exc_info=error)
    return RequestError("engine_error", "the engine failed on this request")
