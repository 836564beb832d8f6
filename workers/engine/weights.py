"""Reads a safetensors snapshot into a model, tensor by tensor, each copied once to where it stays."""

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from workers.engine.errors import LoadError

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with (bytes in place, bytes in all) of the parameters."""

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Loadable(Protocol):
    """What a model class tells the loader; see `models.gemma.GemmaModel`."""

    fusions: ClassVar[dict[str, tuple[str, ...]]]
    prefixes: ClassVar[tuple[tuple[str, str], ...]]

    def fused_rows(self, fused: str) -> tuple[int, ...]: ...
    def unused_reason(self, name: str) -> str | None: ...
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...
    def loaded(self) -> None: ...


def shard_paths(snapshot_dir: Path) -> list[Path]:
    """The weight files: those of the index where there is one, else `model.safetensors`. LoadError when one is missing."""
    index = snapshot_dir / "model.safetensors.index.json"
    if not index.exists():
        names = ["model.safetensors"]
    else:
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise LoadError(f"{index} cannot be read: {error!r}") from None
    for name in names:
        if not (snapshot_dir / name).is_file():
            raise LoadError(f"{snapshot_dir} has no {name}")
    return [snapshot_dir / name for name in names]


def snapshot_tensors(snapshot_dir: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the snapshot by its stored name, mapped from the file and not held: one at a time."""
    for path in shard_paths(snapshot_dir):
        try:
            with safe_open(path, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118 - not a dict
                    yield name, shard.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise LoadError(f"{path} cannot be read: {error}") from None


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a checkpoint tensor goes: rows of a parameter."""

    parameter: nn.Parameter
    first_row: int
    rows: int


def _places(model: Loadable) -> dict[str, _Place]:
    """Checkpoint name → its place, with fused parameters taken apart by the model's table."""
    places: dict[str, _Place] = {}
    for name, parameter in model.named_parameters():
        fused = next((part for part in name.split(".") if part in model.fusions), None)
        if fused is None:
            places[name] = _Place(parameter, 0, parameter.shape[0])
            continue
        first = 0
        for part, rows in zip(model.fusions[fused], model.fused_rows(fused), strict=True):
            places[name.replace(fused, part)] = _Place(parameter, first, rows)
            first += rows
    return places


def _text_name(model: Loadable, stored: str) -> str:
    for prefix, replacement in model.prefixes:
        if stored.startswith(prefix):
            return replacement + stored[len(prefix) :]
    return stored


def _put(name: str, tensor: Tensor, place: _Place) -> None:
    """Copy one tensor to its place, converted to the parameter's type."""
    expected = [place.rows, *place.parameter.shape[1:]]
    if list(tensor.shape) != expected:
        raise LoadError(f"weight {name} has shape {list(tensor.shape)}, expected {expected}")
    if tensor.dtype not in _FLOATS:
        raise LoadError(f"weight {name} has type {tensor.dtype}: only float32, bfloat16 and float16 are supported")
    with torch.no_grad():
        place.parameter[place.first_row : place.first_row + place.rows].copy_(tensor)


def load_weights(model: Loadable, snapshot_dir: Path, on_progress: Progress | None = None) -> None:
    """Fill every parameter of the model from the snapshot; LoadError when one is missing or one is left over."""
    places = _places(model)
    missing = set(places)
    total = sum(p.numel() * p.element_size() for _, p in model.named_parameters())
    done = 0
    reasons: Counter[str] = Counter()
    for stored, tensor in snapshot_tensors(snapshot_dir):
        name = _text_name(model, stored)
        if name not in places:
            reason = model.unused_reason(name)
            if reason is None:
                raise LoadError(f"the snapshot holds a weight that the model has no place for: {stored}")
            reasons[reason] += 1
            continue
        _put(name, tensor, places[name])
        missing.discard(name)
        done += tensor.numel() * places[name].parameter.element_size()
        if on_progress is not None:
            on_progress(done, total)
    if missing:
        raise LoadError(f"the snapshot lacks {len(missing)} weights: {', '.join(sorted(missing)[:5])}")
    model.loaded()
    for reason, count in reasons.items():
        log.info("%d weights are not read: %s", count, reason)
