"""Checkpoints in full precision and in static fp8, and engines on models whose linears are of a scheme."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import workers.engine  # noqa: F401 - before torch's first product
from tests.engine.support import engine_config
from tests.support.tiny import make_tiny_checkpoint
from workers.engine.engine import ScoringEngine
from workers.engine.export import export_fp8, weights_digest
from workers.engine.layers.linear import Linear
from workers.engine.models import GemmaModel, model_config
from workers.engine.quant import QuantLinear
from workers.engine.quant.calibration import Calibration, read_calibration, to_json
from workers.engine.schemes import check_input_scales, quant_linears, set_input_scales, use_scheme
from workers.engine.weights import decoder_linears, load_weights

WEIGHTS = "model.safetensors"


def bf16_checkpoint(directory: Path, **settings: Any) -> Path:
    """A tiny checkpoint whose tensors are stored in bf16."""
    make_tiny_checkpoint(directory, **settings)
    for path in directory.glob("*.safetensors"):
        save_file({name: tensor.bfloat16() for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    return directory


def some_amax(snapshot: Path) -> dict[str, float]:
    """A largest input for every linear, made up: each linear has its own, as no calibration of fused ones would."""
    names = sorted(decoder_linears(GemmaModel(model_config(snapshot))))
    return {name: 2.0 + i % 7 for i, name in enumerate(names)}


def write_calibration(snapshot: Path, path: Path, amax: dict[str, float] | None = None) -> Path:
    """calibration.json of a snapshot, without a corpus."""
    record = {
        "model": {"name": "tiny", "revision": "none", "weights": weights_digest(snapshot)},
        "corpus": {"texts": 0},
    }
    path.write_text(to_json(some_amax(snapshot) if amax is None else amax, record), encoding="utf-8")
    return path


def exported(source: Path, target: Path) -> tuple[Path, Calibration]:
    """The source in static fp8, and the calibration that went into it."""
    calibration = read_calibration(write_calibration(source, target.with_name(f"{target.name}-calibration.json")))
    export_fp8(source, target, calibration)
    return target, calibration


def scheme_model(
    snapshot: Path,
    scheme: str,
    calibration: Calibration | None = None,
    dtype: torch.dtype = torch.float32,
    residual: torch.dtype = torch.float32,
) -> GemmaModel:
    """The snapshot with the decoder's linears in a scheme: codes copied where they are stored, else quantized here."""
    model = GemmaModel(model_config(snapshot), dtype, residual)
    use_scheme(model, scheme)
    load_weights(model, snapshot)
    if calibration is not None:
        set_input_scales(model, calibration)
    check_input_scales(model)
    return model


def dequantized(model: GemmaModel) -> GemmaModel:
    """The same model with plain linears that hold codes · scale, rounded to the model's type."""
    dtype = model.model.embed_tokens.weight.dtype
    for name, module in quant_linears(model).items():
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, plain(module, dtype))
    return model


def plain(module: QuantLinear, dtype: torch.dtype) -> Linear:
    rows, columns = module.weight.shape
    linear = Linear(columns, rows, dtype=dtype)
    linear.weight.copy_(module.weight.float() * module.weight_scale[:, None])
    return linear


def engine_of(snapshot: Path, model: GemmaModel, **settings: str) -> ScoringEngine:
    """An engine of the snapshot's settings that runs this model."""
    engine = ScoringEngine.load(engine_config(snapshot, **settings))
    engine._runner.model = model
    return engine


def change(snapshot: Path, changes: dict[str, Tensor | None], config: dict[str, Any] | None = None) -> Path:
    """Replace (None: remove) tensors of a one-file snapshot, and keys of its config.json."""
    tensors = {**load_file(snapshot / WEIGHTS), **changes}
    save_file({name: t for name, t in tensors.items() if t is not None}, snapshot / WEIGHTS, {"format": "pt"})
    if config is not None:
        path = snapshot / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return snapshot


def same_bits(a: Any, b: Any) -> bool:
    return torch.equal(torch.as_tensor(a).view(torch.int32), torch.as_tensor(b).view(torch.int32))
