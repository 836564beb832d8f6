"""Counts Triton's compilations: none may be left for a request to pay once the engine is ready."""

import logging
from typing import Any

log = logging.getLogger(__name__)


class CompileCounter:
    """Listens to Triton for the life of the process. `compiled`: built anew; `loaded`: found in the cache on disk."""

    def __init__(self) -> None:
        self.compiled = 0
        self.loaded = 0
        self.late = 0
        self._ready = False

    def listen(self) -> None:
        """Become Triton's listener."""
        from triton import knobs

        knobs.compilation.listener = self._heard

    def ready(self) -> None:
        """From now on a compilation is one that a request waits for: it is counted apart and logged."""
        self._ready = True

    def _heard(self, *, src: Any, cache_hit: bool, **_more: Any) -> None:
        self.compiled += not cache_hit
        self.loaded += cache_hit
        if self._ready:
            self.late += 1
            log.warning("a kernel was compiled while serving: %s", getattr(src, "name", src))
