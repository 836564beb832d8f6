"""Static fp8 as it is stored: compressed-tensors `float-quantized`. What config.json says of it, and the scales.

Every linear of the decoder layers is stored as three tensors (see `quant.fp8`); everything else is stored in full. Any
other `quantization_config` is refused.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workers.engine.errors import LoadError
from workers.engine.quant.fp8 import INPUT_SCALE, WEIGHT, WEIGHT_SCALE
from workers.engine.quant.rounding import E4M3_MAX
from workers.engine.shards import StoredTensor

METHOD, FORMAT = "compressed-tensors", "float-quantized"
_KEY = "config.json: quantization_config"
_SCALE_DTYPES = ("F32", "BF16", "F16")  # all exact in float32
_OTHER_TENSORS = {
    *(f"{what}_{kind}" for what in ("weight", "input", "output") for kind in ("scale", "zero_point", "global_scale")),
    *("weight_scale_inv", "weight_scale_2", "weight_packed", "weight_shape", "weight_g_idx"),
    *("q_scale", "k_scale", "v_scale", "qweight", "qzeros", "scales", "g_idx"),
}
"""What quantized linears and caches of any scheme are stored with. Models have other scales of their own."""
_TENSOR_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
_EMPTY: tuple[Any, ...] = (None, {}, [])


@dataclass(frozen=True, slots=True)
class Fp8Static:
    """A checked `quantization_config`: which modules it declares quantized, as compressed-tensors reads the lists.

    An entry is a module's name, `re:` and a pattern matched from the name's beginning, or the class `Linear`.
    """

    targets: tuple[str, ...]
    ignore: tuple[str, ...]

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> "Fp8Static | None":
        """From a whole config.json; None where nothing is quantized. LoadError for every other scheme."""
        found = _quantization_config(config)
        if found is None:
            return None
        _expect(found, "quant_method", (METHOD,), "")
        _expect(found, "format", (FORMAT,), "")
        _expect(found, "quantization_status", ("compressed", "frozen", None), "")
        _expect(found, "kv_cache_scheme", _EMPTY, "")
        _expect(found, "transform_config", _EMPTY, "")
        _expect_dense(found.get("sparsity_config"))
        groups = found.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            raise LoadError(f"{_KEY}.config_groups must name at least one group")
        targets = [name for key, group in groups.items() for name in _group_targets(f".config_groups.{key}", group)]
        return cls(tuple(targets), _names(found, "ignore", "", default=[]))

    def ignored(self, names: Iterable[str]) -> bool:
        """Whether a linear, known by any of these names, is on the ignore list."""
        return _matches(self.ignore, names)

    def targeted(self, names: Iterable[str]) -> bool:
        """Whether a linear is declared quantized, the ignore list aside."""
        return _matches(self.targets, names)


def to_json(ignore: Iterable[str]) -> dict[str, Any]:
    """The `quantization_config` of a checkpoint whose linears are all static fp8, but those ignored."""
    scheme = dict(_TENSOR_SCHEME, group_size=None, block_structure=None, actorder=None)
    group = {
        "format": FORMAT,
        "targets": ["Linear"],
        "weights": {**scheme, "observer": "minmax", "observer_kwargs": {}},
        "input_activations": {**scheme, "observer": "minmax", "observer_kwargs": {}},
        "output_activations": None,
    }
    return {
        "quant_method": METHOD,
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": sorted(ignore),
        "kv_cache_scheme": None,
    }


def _quantization_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    text = config.get("text_config")
    places = [config, text] if isinstance(text, dict) else [config]
    found = [place["quantization_config"] for place in places if place.get("quantization_config") is not None]
    if any(entry != found[0] for entry in found):
        raise LoadError(f"{_KEY} differs from text_config's own")
    if found and not isinstance(found[0], dict):
        raise LoadError(f"{_KEY} must be an object, not {found[0]!r}")
    return found[0] if found else None


def _expect(entry: Mapping[str, Any], key: str, allowed: tuple[Any, ...], where: str) -> None:
    value = entry.get(key)
    if not any(value == one and type(value) is type(one) for one in allowed):
        supported = " or ".join(repr(one) for one in allowed)
        raise LoadError(f"{_KEY}{where}.{key} {value!r} is not supported (supported: {supported})")


def _expect_dense(sparsity: Any) -> None:
    if sparsity not in _EMPTY and not (isinstance(sparsity, dict) and sparsity.get("format") == "dense"):
        raise LoadError(f"{_KEY}.sparsity_config {sparsity!r} is not supported: sparse weights are not read")


def _group_targets(where: str, group: Any) -> tuple[str, ...]:
    if not isinstance(group, dict):
        raise LoadError(f"{_KEY}{where} must be an object, not {group!r}")
    _expect(group, "format", (FORMAT, None), where)
    _expect(group, "output_activations", (None,), where)
    for side in ("weights", "input_activations"):
        scheme = group.get(side)
        if not isinstance(scheme, dict):
            raise LoadError(f"{_KEY}{where}.{side} {scheme!r} is not supported: static fp8 needs a scheme here")
        for key, value in _TENSOR_SCHEME.items():
            _expect(scheme, key, (value,), f"{where}.{side}")
        for key in ("group_size", "block_structure", "actorder"):
            _expect(scheme, key, (None,), f"{where}.{side}")
    targets = _names(group, "targets", where, default=None)
    if not targets:
        raise LoadError(f"{_KEY}{where}.targets is empty")
    return targets


def _names(entry: Mapping[str, Any], key: str, where: str, *, default: list[str] | None) -> tuple[str, ...]:
    """A list of names and patterns, each pattern checked."""
    value = entry.get(key) if entry.get(key) is not None else default
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise LoadError(f"{_KEY}{where}.{key} must be a list of names, not {value!r}")
    for name in value:
        try:
            re.compile(name.removeprefix("re:") if name.startswith("re:") else "")
        except re.error as error:
            raise LoadError(f"{_KEY}{where}.{key}: {name!r} is not a pattern ({error})") from None
    return tuple(value)


def _matches(entries: tuple[str, ...], names: Iterable[str]) -> bool:
    known = set(names)
    return any(
        entry == "Linear"
        or entry in known
        or (entry.startswith("re:") and any(re.match(entry.removeprefix("re:"), name) for name in known))
        for entry in entries
    )


@dataclass(frozen=True, slots=True)
class Scales:
    """weight, input: float32 [1], positive and finite."""

    weight: Tensor
    input: Tensor


def read_scales(
    layout: Fp8Static | None, linears: Mapping[str, tuple[str, ...]], stored: Mapping[str, StoredTensor]
) -> dict[str, Scales]:
    """The scales of every linear, by its stored name. LoadError for a missing, malformed or left-over one.

    layout   None for a snapshot that is not quantized: it may hold no scale
    linears  the decoder's linears: stored name → every name that config.json may call it by
    stored   all tensors of the snapshot
    """
    scales: dict[str, Scales] = {}
    if layout is not None:
        for name, aliases in linears.items():
            _check_declared(layout, name, aliases, stored)
            weight = _scale(name + WEIGHT_SCALE, stored)
            scales[name] = Scales(weight, _scale(name + INPUT_SCALE, stored))
    known = {name + ending for name in scales for ending in (WEIGHT_SCALE, INPUT_SCALE)}
    for name, tensor in stored.items():
        if name not in known and name.rpartition(".")[2] in _OTHER_TENSORS:
            raise LoadError(f"{name} belongs to no linear that config.json declares quantized in static fp8")
        if tensor.dtype.startswith("F8_") and name.removesuffix(WEIGHT) not in scales:
            raise LoadError(f"weight {name} has type {tensor.dtype}, but config.json does not declare it quantized")
        if layout is not None and name.endswith("lm_head.weight") and not layout.ignored([name.removesuffix(WEIGHT)]):
            raise LoadError(f"{_KEY} does not ignore lm_head, but {name} is stored in full")
    return scales


def _check_declared(layout: Fp8Static, name: str, aliases: tuple[str, ...], stored: Mapping[str, StoredTensor]) -> None:
    """The lists and the stored tensors must say the same: this linear is quantized."""
    weight = stored.get(name + WEIGHT)
    is_fp8 = weight is not None and weight.dtype == "F8_E4M3"
    if layout.ignored(aliases) or not layout.targeted(aliases):
        what = "ignores" if layout.ignored(aliases) else "does not target"
        raise LoadError(
            f"{_KEY} {what} {name}, "
            + ("which is stored quantized" if is_fp8 else "but static fp8 needs every linear of the decoder quantized")
        )
    if weight is not None and not is_fp8:
        raise LoadError(f"weight {name + WEIGHT} has type {weight.dtype}: {_KEY} declares it quantized, as F8_E4M3")


def _scale(name: str, stored: Mapping[str, StoredTensor]) -> Tensor:
    tensor = stored.get(name)
    if tensor is None:
        raise LoadError(f"{name} is missing")
    if tensor.shape != (1,):
        raise LoadError(f"{name} has shape {list(tensor.shape)}, expected [1]: one scale for the whole tensor")
    if tensor.dtype not in _SCALE_DTYPES:
        raise LoadError(f"{name} has type {tensor.dtype}, expected one of {', '.join(_SCALE_DTYPES)}")
    value = tensor.read().float()
    if not torch.isfinite(value * E4M3_MAX).all() or not (value > 0).all():
        raise LoadError(f"{name} is {value.item()}: a scale must be positive and finite, 448 times the scale too")
    return value
