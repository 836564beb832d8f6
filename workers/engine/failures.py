"""What a failed pass means: for its caller, and for the device."""

import logging

import torch

from spinf_serve.protocol.errors import RequestError

log = logging.getLogger(__name__)

_OUT_OF_MEMORY = ("allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: Exception) -> bool:
    """Python's, torch's, the libraries' and the CPU allocator's ways to say that memory is short."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)
    )


def request_error(error: Exception) -> RequestError:
    """What the caller is told: the request is too large for the memory, or an error without its details."""
    if is_out_of_memory(error):
        log.error("a request did not fit the memory: %s", error)
        return RequestError("request_too_large", "the request did not fit the engine's memory")
    log.error("a request failed in the engine", exc_info=error)
    return RequestError("engine_error", "the engine failed on this request")
