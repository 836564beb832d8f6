"""Loading the prompt packs beside the supervisor's loop, in a thread that ends with the process."""

import logging
import threading

from spinf_serve.packs.catalog import PackSettings, listing_bytes, load_catalog, pack_files
from spinf_serve.wire.frontend import Packs

log = logging.getLogger(__name__)


class PackLoading:
    """`done` turns True once `packs` or `refusal` (why the server must not start) is set."""

    def __init__(self, settings: PackSettings) -> None:
        self.packs: Packs | None = None
        self.refusal: str | None = None
        self._thread = threading.Thread(target=self._run, args=(settings,), name="packs", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return self.packs is not None or self.refusal is not None

    def _run(self, settings: PackSettings) -> None:
        try:
            catalog = load_catalog(settings)
        except Exception as error:
            log.exception("the packs could not be loaded")
            self.refusal = f"the packs could not be loaded: {type(error).__name__}: {error}"
            return
        for warning in catalog.warnings:
            log.warning(warning)
        for skipped in catalog.skipped:
            log.info(skipped)
        if catalog.problems:
            self.refusal = "\n".join(catalog.problems)
            return
        if catalog.packs:
            log.info("packs: %s", ", ".join(catalog.packs))
        self.packs = Packs(pack_files(catalog), listing_bytes(catalog))
