"""`Pack`: a loaded pack file with both of its sides, the request and the evaluation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spinf_serve.packs.answers import answers_of
from spinf_serve.packs.evaluation import Overrides, evaluate
from spinf_serve.packs.model import PackModel
from spinf_serve.packs.parse import parse_pack
from spinf_serve.packs.problems import PackError
from spinf_serve.packs.rounding import rounded
from spinf_serve.packs.wrapping import Parts, wrap_texts, wrapped
from spinf_serve.protocol.errors import RequestError
from spinf_serve.protocol.json import loads

MAX_FILE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Pack:
    """A pack. `data` is the parsed file, `model` the same as checked objects."""

    data: Mapping[str, Any]
    model: PackModel

    @property
    def id(self) -> str:
        return self.model.id

    @property
    def version(self) -> str:
        return self.model.version

    @property
    def draft(self) -> bool:
        return self.model.draft

    @property
    def warnings(self) -> tuple[str, ...]:
        """What an author should look at; none of it keeps the pack from loading."""
        return self.model.warnings

    def wrap(self, content: str | Parts, context: str | None = None, params: Mapping[str, Any] | None = None) -> Parts:
        """The content's parts in a context: text before, content, text after. Raises `ValueError`."""
        before, after = wrap_texts(self.model, context, params or {})
        return wrapped(before, content, after)

    def request(
        self,
        texts: str | Sequence[str],
        context: str | None = None,
        ids: Sequence[str] | None = None,
        params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        model: str | None = None,
    ) -> dict[str, Any]:
        """A `/v1/score` body that asks the pack's questions as ordinary queries, of a draft too.

        `ids` default to "0", "1", …; `params` are the values of every text, or a list with one mapping per text.
        The results go to `evaluate` one by one. Raises `ValueError`.
        """
        texts = [texts] if isinstance(texts, str) else list(texts)
        names = [str(i) for i in range(len(texts))] if ids is None else list(ids)
        values = [params or {}] * len(texts) if params is None or isinstance(params, Mapping) else list(params)
        if not len(texts) == len(names) == len(values):
            raise ValueError(f"{len(texts)} texts, but {len(names)} ids and {len(values)} sets of parameters")
        inputs = [
            {"id": name, "messages": [{"role": "user", "content": self.wrap(text, context, value)}]}
            for text, name, value in zip(texts, names, values, strict=True)
        ]
        return {"model": model or self.model.model, "inputs": inputs, "scoring": self.scoring()}

    def scoring(self) -> dict[str, Any]:
        """The pack's `scoring` as a request has it: its queries in the pack's own group, with its own floor setting."""
        floors = [query.empty_floor for query in self.model.queries]
        queries = [
            {**query, "empty_floor": floor, "group": self.model.group}
            for query, floor in zip(self.data["scoring"]["queries"], floors, strict=True)
        ]
        return {"queries": queries, "case_insensitive": self.model.case_insensitive}

    def evaluate(
        self,
        result: Mapping[str, Any] | Sequence[Any],
        mode: str | None = None,
        threshold: float | None = None,
        thresholds: Mapping[str, float | None] | None = None,
        critical: Sequence[str] | None = None,
        *,
        context: str | None = None,
    ) -> dict[str, Any]:
        """The result entry of one content: id, version, context, categories, decision, rounded to 6 decimals.

        `result` is one entry of a response's `results` with this pack's queries in it, or that entry's `queries`.
        `context` is only named in the entry. Raises `EvaluationError`.
        """
        found = evaluate(self.model, answers_of(self.model, result), Overrides(mode, threshold, thresholds, critical))
        name = self.model.default_context if context is None else context
        entry: dict[str, Any] = rounded({"id": self.id, "version": self.version, "context": name, **found})
        return entry


def load(path: str | Path, *, draft: bool = False) -> Pack:
    """The pack in a file. Raises `PackError` with every problem.

    `draft=True` also takes a pack that is not fitted yet: its request side works, evaluating it is refused.
    """
    what = str(path)
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise PackError(what, [f"cannot be read: {error.strerror or error}"]) from None
    return from_bytes(content, what, draft=draft)


def from_bytes(content: bytes, what: str, *, draft: bool = False) -> Pack:
    """The pack in a file's bytes; `what` names the file in errors. Raises `PackError`."""
    return from_data(json_of(content, what), what, draft=draft)


def json_of(content: bytes, what: str) -> Any:
    """Strict JSON of at most 16 MiB, as in a request body. Raises `PackError`."""
    if len(content) > MAX_FILE_BYTES:
        raise PackError(what, [f"over {MAX_FILE_BYTES >> 20} MiB"])
    try:
        return loads(content)
    except RequestError as error:
        raise PackError(what, [error.message.replace("the body", "the file")]) from None


def from_data(data: Any, what: str, *, draft: bool = False) -> Pack:
    """The pack in a parsed file. Raises `PackError`."""
    model, problems = parse_pack(data)
    if model is None and draft:
        model, problems = parse_pack(data, draft=True)
    if model is None:
        raise PackError(what, problems.found)
    return Pack(data, model)


def validate(data: Any, *, draft: bool = False) -> list[str]:
    """Every problem of a pack: `data` is a parsed file, its bytes or its text. Empty: it can be loaded."""
    try:
        parsed = (
            json_of(data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data, "")
            if isinstance(data, str | bytes)
            else data
        )
        from_data(parsed, "", draft=draft)
    except PackError as error:
        return error.problems
    return []
