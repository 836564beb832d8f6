"""Reading snapshots: spellings of config.json, shards, types, and every fault as one clear LoadError."""

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from spinf_serve.refusal import StartRefused
from tests.engine.support import engine_config, make_plan, random_jobs, score
from workers.engine import load
from workers.engine.engine import ScoringEngine
from workers.engine.errors import LoadError
from workers.engine.models import GemmaConfig, GemmaModel, model_config
from workers.engine.models.gemma_config import FULL, SLIDING
from workers.engine.weights import load_weights

Json = dict[str, Any]
Tensors = dict[str, torch.Tensor]
PLAN = make_plan(random_jobs(41, 800, [40], 3))[0]


@pytest.fixture
def snapshot(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "copy"))


def edit_config(snapshot: Path, edit: Callable[[Json], Any]) -> None:
    path = snapshot / "config.json"
    config = json.loads(path.read_text())
    config = edit(config) or config
    path.write_text(json.dumps(config))


def edit_weights(snapshot: Path, edit: Callable[[Tensors], Any]) -> None:
    tensors = load_file(snapshot / "model.safetensors")
    tensors = edit(tensors) or tensors
    save_file(tensors, snapshot / "model.safetensors")


def scores(snapshot: Path) -> np.ndarray:
    return score(ScoringEngine.load(engine_config(snapshot)), PLAN).logprobs


def test_multimodal_checkpoint_reads_its_text_part(snapshot: Path, tiny_checkpoint: Path) -> None:
    """`gemma3` with text_config, weights under language_model, a vision tower that is left out."""
    edit_config(snapshot, lambda c: {"model_type": "gemma3", "text_config": c, "tie_word_embeddings": True})
    extra = {"vision_tower.x.weight": torch.zeros(3), "multi_modal_projector.mm.weight": torch.zeros(3)}
    edit_weights(snapshot, lambda t: {f"language_model.{k}": v for k, v in t.items()} | extra)
    assert np.array_equal(scores(snapshot), scores(tiny_checkpoint))


def test_multimodal_checkpoint_in_the_newer_spelling(snapshot: Path, tiny_checkpoint: Path) -> None:
    edit_config(snapshot, lambda c: {"model_type": "gemma3", "text_config": c})
    edit_weights(snapshot, lambda t: {k.replace("model.", "model.language_model.", 1): v for k, v in t.items()})
    assert np.array_equal(scores(snapshot), scores(tiny_checkpoint))


def test_a_stored_copy_of_a_tied_head_is_not_read(snapshot: Path, tiny_checkpoint: Path) -> None:
    edit_weights(snapshot, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"].clone()})
    assert np.array_equal(scores(snapshot), scores(tiny_checkpoint))


def test_a_tied_head_stored_with_other_values_is_refused(snapshot: Path) -> None:
    """The reference would use the stored one: config.json and the weights contradict each other."""
    edit_weights(snapshot, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"] * 2})
    with pytest.raises(LoadError, match=r"makes lm_head\.weight one with model\.embed_tokens\.weight, but"):
        scores(snapshot)


def test_an_untied_head_is_read(snapshot: Path, tiny_checkpoint: Path) -> None:
    edit_config(snapshot, lambda c: c | {"tie_word_embeddings": False})
    with pytest.raises(LoadError, match=r"lm_head\.weight"):
        scores(snapshot)
    edit_weights(snapshot, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"].clone()})
    assert np.array_equal(scores(snapshot), scores(tiny_checkpoint))
    edit_weights(snapshot, lambda t: t | {"lm_head.weight": t["lm_head.weight"] / 2})
    assert not np.allclose(scores(snapshot), scores(tiny_checkpoint))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_weights_are_widened(snapshot: Path, dtype: torch.dtype) -> None:
    edit_weights(snapshot, lambda t: {k: v.to(dtype) for k, v in t.items()})
    half = scores(snapshot)
    edit_weights(snapshot, lambda t: {k: v.float() for k, v in t.items()})
    assert np.array_equal(half, scores(snapshot))


def _config(snapshot: Path) -> GemmaConfig:
    return model_config(snapshot)


def test_older_spelling_of_rope_and_layers(snapshot: Path) -> None:
    def older(c: Json) -> Json:
        for key in ("rope_parameters", "layer_types"):
            del c[key]
        rope = {"rope_theta": 2e6, "rope_local_base_freq": 3e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
        return c | rope | {"sliding_window_pattern": 2}

    edit_config(snapshot, older)
    config = _config(snapshot)
    assert (config.rotary[FULL].theta, config.rotary[FULL].factor) == (2e6, 8.0)
    assert (config.rotary[SLIDING].theta, config.rotary[SLIDING].factor) == (3e4, 1.0)
    assert config.layer_types == (SLIDING, FULL, SLIDING)


def test_absent_keys_take_the_reference_defaults(snapshot: Path) -> None:
    from transformers import Gemma3TextConfig

    (snapshot / "config.json").write_text(json.dumps({"model_type": "gemma3_text"}))
    ours, theirs = _config(snapshot), Gemma3TextConfig()
    assert list(ours.layer_types) == theirs.layer_types
    assert ours.vocab_size == theirs.vocab_size
    assert ours.sliding_window == theirs.sliding_window
    assert ours.scaling == theirs.query_pre_attn_scalar**-0.5
    assert ours.layouts[FULL].num_kv_heads == theirs.num_key_value_heads
    for kind in (FULL, SLIDING):
        assert ours.rotary[kind].theta == theirs.rope_parameters[kind]["rope_theta"]


BAD_CONFIGS: dict[str, Json] = {
    "activation": {"hidden_activation": "silu"},
    "bias": {"attention_bias": True},
    "bidirectional": {"use_bidirectional_attention": True},
    "rope type": {"rope_parameters": {FULL: {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e6}}},
    "rope type, older": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "rope setting": {"rope_parameters": {FULL: {"rope_type": "default", "partial_rotary_factor": 0.5}}},
    "rope layer type": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "linear rope without factor": {"rope_parameters": {FULL: {"rope_type": "linear"}}},
    "layer type": {"layer_types": ["chunked_attention"] * 3},
    "layer count": {"layer_types": ["full_attention"]},
    "quantized": {"quantization_config": {"quant_method": "gptq"}},
    "model type": {"model_type": "llama"},
    "no model type": {"model_type": None},
    "text size": {"hidden_size": "64"},
    "zero size": {"num_hidden_layers": 0},
    "huge size": {"vocab_size": 2**40},
    "huge number": {"rms_norm_eps": 10**400},
    "many layers": {"num_hidden_layers": 10**9, "layer_types": None},
    "layers of no name": {"layer_types": [["x"]] * 3},
    "rope as a number": {"rope_parameters": 5},
    "rope of a layer type as a list": {"rope_parameters": {FULL: [1]}},
    "rope type as a list": {"rope_parameters": {FULL: {"rope_type": [[]]}}},
    "older rope as text": {"rope_scaling": "linear"},
    "epsilon": {"rms_norm_eps": 0},
    "heads": {"num_attention_heads": 3},
    "window": {"sliding_window": None},
    "soft-cap": {"final_logit_softcapping": -1.0},
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_config_faults(snapshot: Path, name: str) -> None:
    edit_config(snapshot, lambda c: c | BAD_CONFIGS[name])
    with pytest.raises(LoadError, match=r"config\.json"):
        ScoringEngine.load(engine_config(snapshot))


SIZES = {
    "vocab_size": "embed_tokens",
    "hidden_size": "embed_tokens",
    "intermediate_size": "mlp",
    "num_attention_heads": "self_attn",
    "head_dim": "self_attn",
}


@pytest.mark.parametrize("key", SIZES)
def test_no_memory_is_taken_for_other_sizes_than_the_weights(
    snapshot: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """A config.json of a larger model is a refusal that names a weight, not a machine without memory."""
    edit_config(snapshot, lambda c: c | {key: 2**20})
    monkeypatch.setattr(load, "GemmaModel", lambda *_: pytest.fail("the model was allocated"))
    with pytest.raises(LoadError, match=rf"{SIZES[key]}.* has shape .* by config\.json"):
        ScoringEngine.load(engine_config(snapshot))


def test_no_memory_is_taken_for_layers_that_are_not_there(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit_config(snapshot, lambda c: c | {"num_hidden_layers": 900, "layer_types": [FULL] * 900})
    monkeypatch.setattr(load, "GemmaModel", lambda *_: pytest.fail("the model was allocated"))
    with pytest.raises(LoadError, match=r"the snapshot lacks .* weights"):
        ScoringEngine.load(engine_config(snapshot))


def _drop_weight(t: Tensors) -> None:
    del t["model.layers.1.self_attn.k_proj.weight"]


BAD_WEIGHTS: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "missing": (_drop_weight, "lacks 1 weights: model.layers.1.self_attn.k_proj.weight"),
    "left over": (lambda t: t | {"model.layers.3.mlp.up_proj.weight": torch.zeros(2)}, "no place for"),
    "wrong rows": (lambda t: t | {"model.norm.weight": torch.zeros(63)}, r"model.norm.weight has shape \[63\]"),
    "wrong part": (
        lambda t: t | {"model.layers.0.mlp.gate_proj.weight": torch.zeros(127, 64)},
        r"gate_proj.weight has shape \[127, 64\], expected \[128, 64\]",
    ),
    "scalar": (lambda t: t | {"model.norm.weight": torch.tensor(1.0)}, "model.norm.weight has shape"),
    "integers": (lambda t: t | {"model.norm.weight": torch.zeros(64, dtype=torch.int8)}, "model.norm.weight has type"),
    "float8": (
        lambda t: t | {"model.norm.weight": torch.zeros(64).to(torch.float8_e4m3fn)},
        "model.norm.weight has type",
    ),
    "double": (lambda t: t | {"model.norm.weight": torch.zeros(64).double()}, "model.norm.weight has type"),
}


NOT_FINITE = {
    "NaN in a norm": ("model.layers.1.self_attn.k_norm.weight", math.nan, "f32"),
    "infinity in a linear": ("model.layers.2.mlp.down_proj.weight", -math.inf, "f32"),
    "NaN in the embedding": ("model.embed_tokens.weight", math.nan, "bf16"),
    "beyond bf16": ("model.layers.0.self_attn.o_proj.weight", 3.4e38, "bf16"),
}


@pytest.mark.parametrize("case", NOT_FINITE)
def test_a_weight_that_is_not_finite_is_refused_by_name(
    snapshot: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Wherever it lies: with blocks of a few rows it is in the last of many."""
    name, value, scheme = NOT_FINITE[case]
    monkeypatch.setattr("workers.engine.shards.BLOCK_BYTES", 4096)
    tensors = load_file(snapshot / "model.safetensors")
    tensors[name].view(-1)[-1] = value
    save_file(tensors, snapshot / "model.safetensors")
    with pytest.raises(LoadError, match=rf"^weight {re.escape(name)} holds a value that is not finite in \w+: "):
        ScoringEngine.load(engine_config(snapshot, quant=scheme))


def test_a_large_weight_that_its_type_holds_is_served(snapshot: Path) -> None:
    name = NOT_FINITE["beyond bf16"][0]
    edit_weights(snapshot, lambda t: t | {name: t[name].index_fill(0, torch.tensor([1]), 3.38e38)})
    ScoringEngine.load(engine_config(snapshot, quant="bf16"))


@pytest.mark.parametrize("name", BAD_WEIGHTS)
def test_weight_faults(snapshot: Path, name: str) -> None:
    edit, message = BAD_WEIGHTS[name]
    edit_weights(snapshot, edit)
    with pytest.raises(LoadError, match=message):
        ScoringEngine.load(engine_config(snapshot))


def _truncate(snapshot: Path) -> None:
    path = snapshot / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


BAD_FILES: dict[str, Callable[[Path], Any]] = {
    "no config": lambda s: (s / "config.json").unlink(),
    "config no JSON": lambda s: (s / "config.json").write_text("{"),
    "config no object": lambda s: (s / "config.json").write_text("[]"),
    "no weights": lambda s: (s / "model.safetensors").unlink(),
    "truncated weights": _truncate,
    "weights no safetensors": lambda s: (s / "model.safetensors").write_bytes(b"\x00" * 64),
    "index no JSON": lambda s: (s / "model.safetensors.index.json").write_text("{"),
    "index of missing shards": lambda s: (s / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}})
    ),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_file_faults(snapshot: Path, name: str) -> None:
    BAD_FILES[name](snapshot)
    with pytest.raises(StartRefused):
        ScoringEngine.load(engine_config(snapshot))


def test_progress_counts_every_byte(tiny_checkpoint: Path) -> None:
    seen: list[tuple[int, int]] = []
    load_weights(GemmaModel(model_config(tiny_checkpoint)), tiny_checkpoint, lambda *args: seen.append(args))
    assert seen[-1][0] == seen[-1][1] > 0
    assert seen == sorted(seen)


@pytest.mark.parametrize("value", [1e300, 1e-300, 5e-324], ids=str)
@pytest.mark.parametrize("key", ["final_logit_softcapping", "rms_norm_eps", "query_pre_attn_scalar"])
def test_numbers_beyond_float32_are_refused(snapshot: Path, key: str, value: float) -> None:
    edit_config(snapshot, lambda c: c | {key: value})
    message = rf"config\.json: {key} must be a positive number of float32, not {re.escape(repr(value))}"
    with pytest.raises(LoadError, match=message):
        model_config(snapshot)
