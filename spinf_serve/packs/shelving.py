"""The packs of a process that has no supervisor: the library and `spinf-serve score`."""

import threading
from collections.abc import Callable

from spinf_serve.packs.catalog import PackSettings, load_catalog, pack_files
from spinf_serve.packs.use import Shelf
from spinf_serve.refusal import StartRefused


class LazyShelf:
    """Calling it gives the packs. Safe between threads.

    Sources that were given are read at once, and a bad one raises `StartRefused`. The official one alone is read when a
    request first asks for a pack: who uses no packs never waits for a network.
    """

    def __init__(self, settings: PackSettings, say: Callable[[str], None]) -> None:
        self._settings, self._say = settings, say
        self._lock = threading.Lock()
        self._shelf: Shelf | None = None
        if settings.sources:
            self()

    def __call__(self) -> Shelf:
        with self._lock:
            if self._shelf is None:
                self._shelf = self._load()
            return self._shelf

    def _load(self) -> Shelf:
        catalog = load_catalog(self._settings)
        if catalog.problems:
            raise StartRefused("; ".join(catalog.problems))
        for line in (*catalog.warnings, *catalog.skipped):
            self._say(line)
        return Shelf.of(pack_files(catalog))
