"""Reads a safetensors snapshot into a model, block by block, each copied once to where it stays."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from workers.engine.errors import LoadError
from workers.engine.layers.linear import Linear
from workers.engine.models.config import read_config
from workers.engine.quant import Fp8Linear, QuantLinear
from workers.engine.quant.compressed_tensors import Fp8Static, Scales, read_scales
from workers.engine.quant.fp8 import INPUT_SCALE, WEIGHT, WEIGHT_SCALE, has_nan, unpack
from workers.engine.quant.linear import Blocks
from workers.engine.shards import Snapshot, StoredTensor

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with (bytes in place, bytes in all) of the parameters."""

_CPU = torch.device("cpu")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Loadable(Protocol):
    """What a model class tells the loader; see `models.gemma.GemmaModel`."""

    fusions: ClassVar[dict[str, tuple[str, ...]]]
    prefixes: ClassVar[tuple[tuple[str, str], ...]]
    decoder: ClassVar[str]

    def unused_reason(self, name: str) -> str | None: ...
    def copy_of(self, name: str) -> str | None: ...
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...
    def get_submodule(self, target: str) -> nn.Module: ...
    def loaded(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Place:
    """Where a checkpoint tensor goes: rows of a parameter of `module`, of which it is the part number `part`."""

    module: nn.Module
    parameter: nn.Parameter
    first_row: int
    rows: int
    part: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the checkpoint tensor must have."""
        return (self.rows, *self.parameter.shape[1:])


def weight_places(model: Loadable) -> dict[str, Place]:
    """Checkpoint name → its place, with fused parameters taken apart by the model's table."""
    places: dict[str, Place] = {}
    for name, parameter in model.named_parameters():
        module = model.get_submodule(name.rpartition(".")[0])
        fused = next((part for part in name.split(".") if part in model.fusions), None)
        if fused is None:
            places[name] = Place(module, parameter, 0, parameter.shape[0], 0)
            continue
        first = 0
        assert isinstance(module, Linear | QuantLinear)
        for i, (part, rows) in enumerate(zip(model.fusions[fused], module.parts, strict=True)):
            places[name.replace(fused, part)] = Place(module, parameter, first, rows, i)
            first += rows
    return places


def decoder_linears(model: Loadable) -> dict[str, Place]:
    """The linears that a quantized snapshot stores quantized, by their checkpoint names without `.weight`."""
    return {
        name.removesuffix(WEIGHT): place
        for name, place in weight_places(model).items()
        if name.startswith(model.decoder) and isinstance(place.module, Linear | QuantLinear)
    }


def text_name(model: Loadable, stored: str) -> str:
    """The text model's name of a stored tensor."""
    for prefix, replacement in model.prefixes:
        if stored.startswith(prefix):
            return replacement + stored[len(prefix) :]
    return stored


def stored_linears(model: Loadable, snapshot: Snapshot) -> dict[str, str]:
    """The decoder's linears, stored name → text name. LoadError when the weight of one is missing or stored twice."""
    linears = decoder_linears(model)
    stored: dict[str, str] = {}
    for name in snapshot.tensors:
        linear = text_name(model, name).removesuffix(WEIGHT)
        if name.endswith(WEIGHT) and linear in linears:
            if linear in stored.values():
                raise LoadError(f"weight {linear} is stored twice: the second time as {name}")
            stored[name.removesuffix(WEIGHT)] = linear
    if missing := linears.keys() - set(stored.values()):
        raise LoadError(f"the snapshot lacks {len(missing)} weights: {', '.join(sorted(missing)[:5])}")
    return stored


def float_blocks(tensor: StoredTensor, scales: Scales | None, device: torch.device = _CPU) -> Blocks:
    """The tensor's rows as float32 on a device, dequantized where it has scales. LoadError for a code without a value.

    They are computed there, too. A GPU holds the tensor as it is stored for as long as the blocks are asked for: so it
    is read and moved once.
    """
    raw = _kept_blocks(tensor, device) if device != _CPU else tensor.blocks
    scale = None if scales is None else scales.weight.to(device)

    def blocks() -> Iterator[tuple[int, Tensor]]:
        for first, rows in raw() if scale is None else _codes(tensor.name, raw()):
            yield first, rows.float() if scale is None else unpack(rows, scale)

    return blocks


def _kept_blocks(tensor: StoredTensor, device: torch.device) -> Blocks:
    """The tensor's own blocks, cut from a copy on the device."""
    kept = torch.empty(tensor.shape, dtype=tensor.torch_dtype, device=device)
    bounds = []
    for first, rows in tensor.blocks():
        kept[first : first + len(rows)] = rows
        bounds.append((first, first + len(rows)))
    return lambda: ((first, kept[first:end]) for first, end in bounds)


def _codes(name: str, blocks: Iterable[tuple[int, Tensor]]) -> Iterator[tuple[int, Tensor]]:
    for first, codes in blocks:
        if has_nan(codes):
            raise LoadError(f"weight {name} holds a code that is not a number")
        yield first, codes


def _put(tensor: StoredTensor, place: Place, scales: Scales | None) -> None:
    """Copy one tensor to its place: converted to the parameter's type, or in the codes of the place's scheme."""
    if tensor.shape != place.shape:
        raise LoadError(f"weight {tensor.name} has shape {list(tensor.shape)}, expected {list(place.shape)}")
    if scales is None and tensor.torch_dtype not in _FLOATS:
        raise LoadError(f"weight {tensor.name} has type {tensor.dtype}: only F32, BF16 and F16 are supported")
    if isinstance(place.module, QuantLinear):
        _put_codes(tensor, place.module, place.part, scales)
        return
    device = place.parameter.device
    for first, rows in float_blocks(tensor, scales, device)() if scales is not None else tensor.blocks():
        placed = place.parameter[place.first_row + first : place.first_row + first + len(rows)]
        placed.copy_(rows.to(device))  # moved before it is converted: the device rounds as the CPU does, and faster
        _check_finite(tensor, placed)


def _check_finite(tensor: StoredTensor, placed: Tensor) -> None:
    """LoadError where rows in their place hold NaN or an infinity: as stored, or because their type ends before.

    Such a model would start, and answer requests with errors alone.
    """
    # One pass without a copy, at the speed of the memory; NaN is kept by both.
    if not torch.stack(torch.aminmax(placed)).isfinite().all():
        dtype = str(placed.dtype).removeprefix("torch.")
        raise LoadError(f"weight {tensor.name} holds a value that is not finite in {dtype}: NaN, or too large")


def _put_codes(tensor: StoredTensor, linear: QuantLinear, part: int, scales: Scales | None) -> None:
    """Codes of the same kind are copied as they are; anything else is quantized from its float32 rows."""
    device = linear.weight.device
    if scales is not None and isinstance(linear, Fp8Linear):
        moved = ((first, codes.to(device)) for first, codes in tensor.blocks())
        linear.put_stored(part, _codes(tensor.name, moved), scales.weight.to(device))
        linear.input_scales[part] = scales.input.to(device)
        return
    try:
        linear.put(part, float_blocks(tensor, scales, device))
    except ValueError as error:
        raise LoadError(f"weight {tensor.name} {error}") from None


@torch.no_grad()
def load_weights(model: Loadable, snapshot_dir: Path, on_progress: Progress | None = None) -> None:
    """Fill every parameter of the model from the snapshot; LoadError when one is missing or one is left over.

    A snapshot in static fp8 is dequantized on its way, but into linears of that scheme, which take its codes.
    """
    layout = Fp8Static.from_json(read_config(snapshot_dir))
    places = weight_places(model)
    missing = set(places)
    total = sum(p.numel() * p.element_size() for _, p in model.named_parameters())
    done = 0
    reasons: Counter[str] = Counter()
    read: dict[str, StoredTensor] = {}
    copies: list[tuple[StoredTensor, str]] = []
    with Snapshot(snapshot_dir) as snapshot:
        scales = _scales(model, layout, snapshot)
        for stored, tensor in snapshot.tensors.items():
            name = text_name(model, stored)
            if name not in places:
                if stored.endswith((WEIGHT_SCALE, INPUT_SCALE)) and stored.rpartition(".")[0] in scales:
                    continue  # read already
                original, reason = model.copy_of(name), model.unused_reason(name)
                if original in places:
                    copies.append((tensor, original))
                    reason = "they are copies of weights that are"
                if reason is None:
                    raise LoadError(f"the snapshot holds a weight that the model has no place for: {stored}")
                reasons[reason] += 1
                continue
            if name not in missing:
                raise LoadError(f"weight {name} is stored twice: the second time as {stored}")
            _put(tensor, places[name], scales.get(stored.removesuffix(WEIGHT)))
            read[name] = tensor
            missing.discard(name)
            done += math.prod(tensor.shape) * places[name].parameter.element_size()
            if on_progress is not None:
                on_progress(done, total)
        if missing:
            raise LoadError(f"the snapshot lacks {len(missing)} weights: {', '.join(sorted(missing)[:5])}")
        for tensor, original in copies:
            check_copy(tensor, read[original])
    for linear in {place.module for place in places.values() if isinstance(place.module, QuantLinear)}:
        linear.loaded()
    model.loaded()
    for reason, count in reasons.items():
        log.info("%d weights are not read: %s", count, reason)


def check_copy(copy: StoredTensor, original: StoredTensor) -> None:
    """LoadError where a tensor that config.json makes one with another is stored with other values."""
    equal = (copy.shape, copy.dtype) == (original.shape, original.dtype)
    blocks, others = copy.blocks(), original.blocks()
    while equal and (block := next(blocks, None)) is not None:
        rows = block[1].clone()  # the next block, of whichever tensor, may overwrite it
        equal = torch.equal(rows, next(others)[1])
    if not equal:
        raise LoadError(
            f"config.json makes {copy.name} one with {original.name}, but the snapshot stores different values"
        )


def _scales(model: Loadable, layout: Fp8Static | None, snapshot: Snapshot) -> dict[str, Scales]:
    """The scales of a quantized snapshot by the stored name of the linear; {} for one in full precision."""
    linears = stored_linears(model, snapshot) if layout is not None else {}
    return read_scales(layout, {stored: (stored, text) for stored, text in linears.items()}, snapshot.tensors)
