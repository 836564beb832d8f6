"""Parity: a fixture's scores beside recorded ones. Everything but the scoring itself; no torch.

A fixture is one request body. It is scored in several passes that pack it differently; every pass must give the
recorded numbers.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from spinf_serve.jsonfile import parse
from spinf_serve.plan import EngineInfo
from spinf_serve.refusal import StartRefused

Json = dict[str, Any]

FORMAT = "spinf-parity-1"
F32_BOUND = 1e-4
"""How far float32 log-probabilities may be apart on another machine or version (the bound of every family's tests)."""

ARRANGEMENTS = ("whole", "one by one", "reversed")
"""How the passes pack the fixture, in turns: as it is, each entry in a request of its own, entries in reverse order."""


@dataclass(frozen=True, slots=True)
class Fixture:
    """One body of `POST /v0/score` (its entries are `jobs`) or of `POST /v1/score` (`inputs`, or the one `messages`).

    digest: sha256 of its JSON, whatever the layout of the file.
    """

    body: Json
    digest: str

    @property
    def is_jobs(self) -> bool:
        """Whether it is a body of `/v0/score`."""
        return "jobs" in self.body

    def bodies(self, number: int) -> list[Json]:
        """The requests of pass `number`, counted from 0."""
        key = "jobs" if self.is_jobs else "inputs"
        entries = self.body.get(key)
        arrangement = ARRANGEMENTS[number % len(ARRANGEMENTS)]
        if not isinstance(entries, list) or arrangement == "whole":
            return [self.body]
        parts = [[entry] for entry in entries] if arrangement == "one by one" else [entries[::-1]]
        return [{**self.body, key: part} for part in parts]

    def results(self, responses: Iterable[Json]) -> Json:
        """Entry id → its numbers, from the responses to the requests of one pass."""
        found: Json = {}
        for entry in (entry for response in responses for entry in response["results"]):
            if self.is_jobs:
                found[entry["id"]] = {"logprobs": entry["logprobs"]}
            else:
                found[entry["input_id"]] = {key: value for key, value in entry.items() if key != "input_id"}
        return found


def read_fixture(path: Path) -> Fixture:
    """Raises `StartRefused` naming the file."""
    body = _read(path, "fixture")
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    return Fixture(body, f"sha256:{hashlib.sha256(canonical).hexdigest()}")


def _read(path: Path, what: str) -> Json:
    try:
        value = parse(path.read_bytes(), unique=True)
    except OSError as error:
        raise StartRefused(f"the {what} {path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise StartRefused(f"the {what} {path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise StartRefused(f"the {what} {path} is not a JSON object")
    return value


@dataclass(frozen=True, slots=True)
class Reference:
    """Recorded numbers and what produced them. `results`: entry id → its numbers, as the response has them."""

    model: str
    revision: str
    scheme: str
    fingerprint: str
    versions: dict[str, str | None]
    fixture: str
    results: Json

    @classmethod
    def of(cls, model: str, revision: str, info: EngineInfo, fixture: Fixture, results: Json) -> "Reference":
        """What is to be recorded."""
        return cls(model, revision, info.scheme, info.fingerprint, info.versions, fixture.digest, results)

    @classmethod
    def read(cls, path: Path) -> "Reference":
        """Raises `StartRefused` naming the file."""
        value = _read(path, "reference")
        if value.pop("format", None) != FORMAT or value.keys() != {*cls.__dataclass_fields__}:
            raise StartRefused(f"{path} is no parity reference ({FORMAT}): record it with --record")
        for name, part in value.items():
            if not isinstance(part, dict if name in ("versions", "results") else str):
                raise StartRefused(f"{path} is no parity reference: {name} is {type(part).__name__}")
        return cls(**value)

    def write(self, path: Path) -> None:
        """Whole or not at all."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise StartRefused(f"the reference {path} cannot be written: {error}") from None


def check_writable(path: Path) -> None:
    """Raises `StartRefused` where no reference can be written: before anything is scored, not after."""
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise StartRefused(f"the reference {path} cannot be written: {path.parent} takes no such file")


def check_belongs(reference: Reference, fixture: Fixture, scheme: str | None) -> None:
    """Raises `StartRefused` for a reference of another fixture, or of another scheme where that is known already."""
    if reference.fixture != fixture.digest:
        raise StartRefused("the reference belongs to another fixture: record it again with --record")
    if scheme is not None and reference.scheme != scheme:
        raise StartRefused(f"the reference was recorded in scheme {reference.scheme}, this is {scheme}")


def bound_for(reference: Reference, info: EngineInfo, fixture: Fixture) -> float:
    """How far numbers may be apart: 0 means equal bits. Raises `StartRefused` where nothing can be compared."""
    check_belongs(reference, fixture, info.scheme)
    if reference.fingerprint == info.fingerprint and info.batch_invariant:
        return 0.0
    if info.scheme != "f32":
        raise StartRefused(
            f"the reference was recorded by {reference.fingerprint}, this is {info.fingerprint}: in scheme "
            f"{info.scheme} only scores of one batch-invariant engine can be compared"
        )
    return F32_BOUND


@dataclass(frozen=True, slots=True)
class Difference:
    """A value that is not the recorded one. `path` leads to it inside the entry."""

    path: str
    recorded: Any
    now: Any

    @property
    def size(self) -> float:
        """How far two numbers are apart; infinite where they are not both numbers."""
        if _is_number(self.recorded) and _is_number(self.now):
            try:
                return abs(float(self.recorded) - float(self.now))
            except OverflowError:  # a whole number beyond every float
                return float("inf")
        return float("inf")


@dataclass(frozen=True, slots=True)
class Comparison:
    """One entry in one pass. `largest`: over all its numbers; `differences`: those beyond the bound."""

    values: int
    largest: float
    differences: tuple[Difference, ...]


def compare_entries(recorded: Json, now: Json, bound: float) -> dict[str, Comparison]:
    """Entry id → its comparison, of all entries that either has."""
    return {entry: compare(recorded.get(entry), now.get(entry), bound) for entry in recorded | now}


def compare(recorded: Any, now: Any, bound: float) -> Comparison:
    """Two trees of JSON values: numbers within the bound, everything else equal."""
    pairs = [Difference(*pair) for pair in _pairs(recorded, now, "")]
    unequal = [pair for pair in pairs if pair.recorded != pair.now or _is_number(pair.recorded) != _is_number(pair.now)]
    sizes = [pair.size for pair in unequal]
    return Comparison(
        values=sum(_is_number(pair.recorded) for pair in pairs),
        largest=max(sizes, default=0.0),
        differences=tuple(pair for pair, size in zip(unequal, sizes, strict=True) if not size <= bound),
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_ABSENT = "(absent)"


def _pairs(recorded: Any, now: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """(path, recorded, now) of every leaf; a part that only one tree has is a leaf."""
    if isinstance(recorded, list) and isinstance(now, list):
        recorded, now = ({str(i): item for i, item in enumerate(tree)} for tree in (recorded, now))
    if not (isinstance(recorded, dict) and isinstance(now, dict)):
        yield path, recorded, now
        return
    for key in recorded | now:
        inner = f"{path}.{key}" if path else key
        yield from _pairs(recorded.get(key, _ABSENT), now.get(key, _ABSENT), inner)
