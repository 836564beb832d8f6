"""Finding (or converting) the snapshot beside the supervisor's loop, in a thread that ends with the process."""

import logging
import threading

from spinf_serve.config import ServedModel
from spinf_serve.manifests import ModelChoice
from spinf_serve.refusal import StartRefused
from spinf_serve.snapshots import resolve

log = logging.getLogger(__name__)


class Resolution:
    """`done` turns True once `model` or `refusal` (why nothing can be served) is set."""

    def __init__(self, choice: ModelChoice) -> None:
        self.model: ServedModel | None = None
        self.refusal: str | None = None
        self._thread = threading.Thread(target=self._run, args=(choice,), name="snapshot", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return self.model is not None or self.refusal is not None

    @property
    def running(self) -> bool:
        """It cannot be interrupted: a process that ends meanwhile must not wait for it."""
        return self._thread.is_alive()

    def _run(self, choice: ModelChoice) -> None:
        try:
            self.model = resolve(choice, on_progress=log.info)
        except StartRefused as error:
            self.refusal = str(error)
        except Exception as error:
            log.exception("the snapshot could not be prepared")
            self.refusal = f"the snapshot could not be prepared: {type(error).__name__}: {error}"
