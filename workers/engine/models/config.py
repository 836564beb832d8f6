"""Reading config.json: typed values with one clear message each, and rotary settings in both spellings."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spinf_serve.jsonfile import parse
from workers.engine.errors import LoadError

Json = dict[str, Any]


def read_config(snapshot_dir: Path) -> Json:
    """config.json as a dict; LoadError when it is missing or no JSON object."""
    path = snapshot_dir / "config.json"
    try:
        config = parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LoadError(f"{snapshot_dir} has no config.json") from None
    except (OSError, ValueError) as error:
        raise LoadError(f"{path} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise LoadError(f"{path} is not a JSON object")
    return config


_LARGEST_SIZE = 1 << 20
"""No model has a wider row or a larger vocabulary; products of three sizes stay below 2^63."""


def integer(config: Json, key: str, default: int | None = None, *, largest: int = _LARGEST_SIZE) -> int:
    """A positive integer up to `largest`; the default where the key is absent."""
    value = config.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= largest:
        raise LoadError(f"config.json: {key} must be a positive integer up to {largest}, not {_shown(value)}")
    return value


_NUMBERS = torch.finfo(torch.float32)
"""What is computed in float32 must be a number there: beyond its range it would be infinite or zero."""


def _shown(value: Any) -> str:
    """A value in a message, which nobody reads to the end of a long one."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def number(config: Json, key: str, default: float | None = None) -> float:
    """A positive number that float32 holds; the default where the key is absent."""
    value = config.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not _NUMBERS.tiny <= value <= _NUMBERS.max:
        raise LoadError(f"config.json: {key} must be a positive number of float32, not {_shown(value)}")
    return float(value)


def optional_number(config: Json, key: str) -> float | None:
    """A positive finite number, or None where the key is absent or null."""
    return None if config.get(key) is None else number(config, key)


def boolean(config: Json, key: str, default: bool) -> bool:
    """True or false; the default where the key is absent."""
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise LoadError(f"config.json: {key} must be true or false, not {value!r}")
    return value


def require(config: Json, key: str, default: Any, allowed: tuple[Any, ...]) -> None:
    """LoadError unless the value is one that this engine computes."""
    value = config.get(key, default)
    if value not in allowed:
        raise LoadError(f"config.json: {key} {value!r} is not supported (supported: {', '.join(map(repr, allowed))})")


@dataclass(frozen=True, slots=True)
class RotarySettings:
    """theta: the base; factor: positions are divided by it (`linear` scaling), 1.0 without scaling.

    turned: the share of a head's pairs that turn (`proportional`), the first ones; the others stay as they are.
    """

    theta: float
    factor: float = 1.0
    turned: float = 1.0

    @classmethod
    def from_json(
        cls, name: str, settings: Json, theta: float | None, kinds: tuple[str, ...] = ("default", "linear")
    ) -> "RotarySettings":
        """From one layer type's entry of a supported kind; `theta` stands where the entry names no base."""
        named = [settings[key] for key in ("rope_type", "type") if key in settings] or ["default"]
        kind = named[0]
        if named[-1] != kind:
            raise LoadError(f"config.json: the rope settings of {name} name two types")
        if kind not in kinds:
            supported = ", ".join(kinds)
            raise LoadError(f"config.json: rope type {kind!r} of {name} is not supported (supported: {supported})")
        known = {"rope_type", "type", "rope_theta", "factor"}
        unknown = set(settings) - known - ({"partial_rotary_factor"} if kind == "proportional" else set())
        if unknown:
            raise LoadError(f"config.json: unknown rope setting of {name}: {', '.join(sorted(unknown))}")
        factor = number(settings, "factor", None if kind == "linear" else 1.0) if kind != "default" else 1.0
        turned = number(settings, "partial_rotary_factor", 1.0)
        if turned > 1:
            raise LoadError(f"config.json: partial_rotary_factor of {name} must be at most 1, not {turned}")
        return cls(number(settings, "rope_theta", theta), factor, turned)

    def inv_freq(self, head_dim: int) -> Tensor:
        """[D/2] float32: theta^(-2i/D) / factor, rounded as transformers rounds it; 0 for a pair that does not turn."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        frequencies = 1.0 / (self.theta**exponents) / self.factor
        frequencies[int(self.turned * head_dim // 2) :] = 0.0
        return frequencies
