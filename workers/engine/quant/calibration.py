"""calibration.json: the largest input of every linear over a corpus, and the activation scales made from it."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spinf_serve.jsonfile import parse
from workers.engine.errors import LoadError
from workers.engine.quant.fp8 import input_scale

FORMAT = "spinf-calibration-1"
FORMULA = "2^ceil(log2(2*amax/448))"
_LARGEST = torch.finfo(torch.float32).max / 448


@dataclass(frozen=True, slots=True)
class Calibration:
    """A read file. `scales`: linear → input scale; `digest`: sha256 of the file; `record`: everything else it says."""

    scales: dict[str, float]
    digest: str
    record: dict[str, Any]

    @property
    def weights_digest(self) -> str:
        """The digest of the weights that were calibrated."""
        return str(self.record["model"]["weights"])

    def check_names(self, linears: Iterable[str]) -> None:
        """LoadError unless there is a scale for each of these linears and for nothing else."""
        expected = set(linears)
        if missing := sorted(expected - self.scales.keys()):
            raise LoadError(f"the calibration lacks {len(missing)} linears: {', '.join(missing[:5])}")
        if extra := sorted(self.scales.keys() - expected):
            raise LoadError(f"the calibration names {len(extra)} linears that are not there: {', '.join(extra[:5])}")


def to_json(amax: dict[str, float], record: dict[str, Any]) -> str:
    """The file's text: the record (model, corpus, versions), then every linear's amax and scale."""
    linears = {name: {"amax": value, "input_scale": input_scale(value)} for name, value in sorted(amax.items())}
    content = {"format": FORMAT, **record, "formula": FORMULA, "linears": linears}
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def read_calibration(path: Path) -> Calibration:
    """Raises LoadError naming the file, and the linear where a scale is unusable."""
    try:
        raw = path.read_bytes()
        content = parse(raw)
        if content["format"] != FORMAT:
            raise ValueError(f"format is {content['format']!r}, not {FORMAT!r}")
        entries = content.pop("linears")
        scales = {str(name): entry["input_scale"] for name, entry in entries.items()}
        calibration = Calibration(scales, hashlib.sha256(raw).hexdigest(), content)
        if not calibration.weights_digest.startswith("sha256:"):
            raise ValueError("model.weights is not a digest")
    except OSError as error:
        raise LoadError(f"the calibration {path} cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(f"{path} is not a calibration: {error!r}") from None
    for name, scale in scales.items():
        if isinstance(scale, bool) or not isinstance(scale, int | float) or not _is_scale(scale):
            raise LoadError(f"{path}: input_scale of {name} is {scale!r}: it must be a positive float32 number")
    return calibration


def _is_scale(value: float) -> bool:
    """Positive, finite, and the same number in float32: what is written is what was calibrated."""
    return 0 < value < _LARGEST and torch.tensor(float(value), dtype=torch.float32).item() == value
