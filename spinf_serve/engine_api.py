"""`Engine`: the library entry point. The objects of the server, in one process, without sockets."""

import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from spinf_serve import snapshots
from spinf_serve.engine_thread import EngineThread
from spinf_serve.extras import missing_engine_packages
from spinf_serve.gpus import machine_refusal
from spinf_serve.packs.shelving import LazyShelf
from spinf_serve.plan import EngineInfo
from spinf_serve.protocol.errors import RequestError
from spinf_serve.protocol.ids import new_request_id
from spinf_serve.refusal import StartRefused
from spinf_serve.settings import SETTINGS, Settings
from spinf_serve.turns import Turns

if TYPE_CHECKING:
    from workers.preprocess.preprocessor import RequestHeader

log = logging.getLogger(__name__)

Progress = Callable[[str], None]
Body = dict[str, Any] | bytes | str


class Engine:
    """A loaded model that scores requests: `Engine("gemma-3-270m", device="cpu").score(body)`.

    `model` and the keywords are the settings of `spinf-serve serve` by their names (`token_budget=…`, `max_options=…`);
    SPINF_* variables, a settings file and the model's manifest count under them, as for the server. The caller is
    trusted. `score` may be called from several threads at once: their requests then share passes. A process forked from
    this one needs an engine of its own. Needs the packages of `spinf-serve[server]`.

    Raises `StartRefused` for settings or a model that cannot be used.
    """

    def __init__(self, model: str | None = None, *, on_progress: Progress | None = None, **settings: Any) -> None:
        self._open(Settings.load(_known({"model": model, **settings}), keywords=True), on_progress, None)

    @classmethod
    def from_settings(
        cls, settings: Settings, *, on_progress: Progress | None = None, first: Body | None = None, jobs: bool = False
    ) -> Self:
        """The same from settings that are merged already.

        `first` is a body that is going to be scored (with `jobs`, by `score_jobs`): what is wrong with it raises
        `RequestError` before the weights are looked for, or at the latest before they are read.
        """
        engine = cls.__new__(cls)
        engine._open(settings, on_progress, None if first is None else (_to_bytes(first), _header(jobs)))
        return engine

    def _open(
        self, settings: Settings, on_progress: Progress | None, first: "tuple[bytes, RequestHeader] | None"
    ) -> None:
        if refusals := settings.refusals():
            raise StartRefused("; ".join(refusals))
        if missing := missing_engine_packages():
            raise StartRefused(f"{', '.join(missing)} not installed: pip install 'spinf-serve[server]'")
        if reason := machine_refusal(settings.device):
            raise StartRefused(reason)
        from workers.engine.engine import ScoringEngine  # loads torch
        from workers.preprocess.preprocessor import Preprocessor, read_body
        from workers.preprocess.tokenizer import ContentTokenizer

        choice = settings.choice()
        described = snapshots.describe(choice)
        shelf = LazyShelf(settings.pack_settings(described), on_progress or log.warning)
        if first is not None:
            read_body(*first, settings.preprocess_config(described), shelf).faults.check()
        self.model = snapshots.resolve(choice, on_progress)
        try:
            tokenizer = ContentTokenizer.load(Path(self.model.snapshot_dir))
        except (OSError, ValueError) as error:
            raise StartRefused(f"the tokenizer cannot be loaded: {error}") from None
        self._turns = Turns()
        self._pid = os.getpid()
        self._preprocessor = Preprocessor(settings.preprocess_config(self.model), tokenizer, shelf)
        if first is not None:
            self._preprocessor.prepare(*first)
        self._engine = ScoringEngine.load(settings.engine_config(self.model), on_progress)
        try:
            self._engine.warm_up(on_progress)
            self._engine.host_turn = self._turns.first
            self._thread = EngineThread(self._engine)
        except BaseException:
            self._engine.close()
            raise

    @property
    def info(self) -> EngineInfo:
        """What produces the scores: fingerprint, scheme, versions, load times."""
        return self._engine.info

    def score(self, body: Body) -> dict[str, Any]:
        """Score one body of `POST /v1/score` and return the response. Raises `RequestError` as the server answers."""
        response: dict[str, Any] = json.loads(self.score_bytes(_to_bytes(body)))
        return response

    def score_jobs(self, body: Body) -> dict[str, Any]:
        """Score one body of `POST /v0/score`, the engine primitive: whole prompt texts in, unrounded numbers out."""
        response: dict[str, Any] = json.loads(self._respond(_to_bytes(body), _header(jobs=True)))
        return response

    def score_bytes(self, body: bytes, request_id: str | None = None) -> bytes:
        """`score` from the raw body to the raw response, whose id is `request_id` (default: a new one)."""
        return self._respond(body, _header(jobs=False, request_id=request_id))

    def _respond(self, body: bytes, header: "RequestHeader") -> bytes:
        if os.getpid() != self._pid:
            raise RequestError("model_unavailable", "an Engine does not outlive a fork: make one in each process")
        prepared = self._turns.others(lambda: self._preprocessor.prepare(body, header))
        result = self._thread.run(prepared.plan)
        return self._turns.others(lambda: self._preprocessor.assemble(prepared, result))

    def close(self) -> None:
        """Free the model. Requests that still wait fail with `model_unavailable`; may be called twice.

        In a process forked from the engine's own there is nothing to free.
        """
        if os.getpid() != self._pid:
            return
        self._thread.close()
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _known(settings: dict[str, Any]) -> dict[str, Any]:
    if unknown := settings.keys() - SETTINGS.keys():
        raise TypeError(f"Engine() got an unknown setting: {min(unknown)}")
    return settings


def _header(jobs: bool, request_id: str | None = None) -> "RequestHeader":
    """A trusted caller's, with a new id unless one is given."""
    from workers.preprocess.preprocessor import RequestHeader

    return RequestHeader(
        request_id=request_id or new_request_id(),
        route="v0_score" if jobs else "score",
        trusted=True,
        content_encoding=None,
        received=time.monotonic(),
    )


def _to_bytes(body: Body) -> bytes:
    """A body as it would travel. What JSON cannot hold stays visible to the parser, which refuses it with its code."""
    if isinstance(body, bytes):
        return body
    if isinstance(body, str):
        return body.encode("utf-8", errors="surrogatepass")
    return json.dumps(body).encode("ascii")
