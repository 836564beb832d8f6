"""config.json of Gemma 4: what is read, with which defaults, and what is refused before a weight is read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.support import engine_config
from tests.support.tiny_gemma4 import FORMS, make_tiny_gemma4
from workers.engine.engine import ScoringEngine
from workers.engine.errors import LoadError
from workers.engine.models import GemmaModel, model_config
from workers.engine.models.gemma_config import FULL, SLIDING
from workers.engine.weights import decoder_linears

Json = dict[str, Any]


def write_config(directory: Path, config: Json) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def edit_text(snapshot: Path, edit: Callable[[Json], Json]) -> None:
    """Change the text part of a snapshot's config.json."""
    config = json.loads((snapshot / "config.json").read_text())
    if "text_config" in config:
        config["text_config"] = edit(config["text_config"])
    else:
        config = edit(config)
    write_config(snapshot, config)


def without_weights(directory: Path, model_type: str, edit: Callable[[Json], Json]) -> Path:
    """A snapshot whose config is edited and whose weights are gone: whoever reads them fails otherwise."""
    snapshot = make_tiny_gemma4(directory / "snapshot", model_type=model_type)
    (snapshot / "model.safetensors").unlink()
    edit_text(snapshot, edit)
    return snapshot


@pytest.mark.parametrize("model_type", ["gemma4_text", "gemma4_unified_text"])
def test_absent_keys_take_the_reference_defaults(tmp_path: Path, model_type: str) -> None:
    from transformers import AutoConfig

    given = {"model_type": model_type, "hidden_size_per_layer_input": 0}
    ours, theirs = model_config(write_config(tmp_path, given)), AutoConfig.for_model(**given)
    assert list(ours.layer_types) == theirs.layer_types
    for name in ("vocab_size", "hidden_size", "intermediate_size", "sliding_window"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.final_softcap == theirs.final_logit_softcapping
    for kind in (FULL, SLIDING):
        layer = theirs.per_layer_config[kind]
        assert (ours.layouts[kind].num_kv_heads, ours.layouts[kind].head_dim) == (
            layer.num_key_value_heads,
            layer.head_dim,
        )
        assert ours.rotary[kind].theta == theirs.rope_parameters[kind]["rope_theta"]
        assert ours.rotary[kind].turned == theirs.rope_parameters[kind].get("partial_rotary_factor", 1.0)


def test_the_12b_shape(tmp_path: Path) -> None:
    """The dimensions of models.md: 328 linears with 10.9 G parameters."""
    text = {
        "model_type": "gemma4_unified_text", "hidden_size": 3840, "num_hidden_layers": 48, "intermediate_size": 15360,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "global_head_dim": 512,
        "num_global_key_value_heads": 1, "attention_k_eq_v": True, "final_logit_softcapping": 30.0,
    }  # fmt: skip
    config = model_config(write_config(tmp_path, {"model_type": "gemma4_unified", "text_config": text}))
    with torch.device("meta"):
        linears = decoder_linears(GemmaModel(config))
    assert len(linears) == 328
    assert round(sum(place.rows * place.parameter.shape[1] for place in linears.values()) / 1e9, 1) == 10.9
    assert config.sliding_window == 1024
    assert (config.layout(0).group, config.layout(5).group, config.layout(5).shared_kv) == (2, 16, True)


def test_turned_pairs_are_those_of_the_reference(tmp_path: Path) -> None:
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    snapshot = make_tiny_gemma4(tmp_path / "snapshot")
    theirs, _ = ROPE_INIT_FUNCTIONS["proportional"](AutoConfig.from_pretrained(snapshot), layer_type=FULL)
    assert torch.equal(model_config(snapshot).rotary[FULL].inv_freq(16), theirs)
    assert theirs.count_nonzero() == 2


SLIDES = {SLIDING: {"rope_type": "default", "rope_theta": 1e4}}

VARIANTS: dict[str, tuple[Json, str]] = {
    "E2B": ({"hidden_size_per_layer_input": 256}, "per-layer input embeddings"),
    "shared keys and values": ({"num_kv_shared_layers": 2}, "share keys and values"),
    "mixture of experts": ({"enable_moe_block": True, "num_experts": 8}, "mixture-of-experts"),
    "bidirectional": ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
    "bias": ({"attention_bias": True}, "attention_bias"),
    "activation": ({"hidden_activation": "silu"}, "hidden_activation"),
    "rope type": ({"rope_parameters": SLIDES | {FULL: {"rope_type": "yarn", "rope_theta": 1e6}}}, "rope type 'yarn'"),
    "rope of one type": ({"rope_parameters": {FULL: {"rope_type": "default", "rope_theta": 1e6}}}, "lacks sliding"),
    "rope without a base": ({"rope_parameters": {FULL: {}, SLIDING: {}}}, "rope_theta"),
    "flat rope": ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "no layer type"),
    "turned over 1": (
        {
            "rope_parameters": SLIDES
            | {FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 1.5}}
        },
        "at most 1",
    ),
    "layer types": ({"layer_types": ["chunked_attention"] * 4}, "layer_types"),
    "heads": ({"num_global_key_value_heads": 3}, "do not divide"),
    "global head size": ({"global_head_dim": None}, "global_head_dim"),
    "other layers' settings": ({"per_layer_config": {"1": {"intermediate_size": 64}}}, "intermediate_size is not"),
    "skipped parts": ({"per_layer_config": {"1": {"skip": ["mlp"]}}}, "skip is not supported"),
    "no such layer": ({"per_layer_config": {"4": {"head_dim": 16}}}, r"per_layer_config\.4"),
    "layer of many digits": ({"per_layer_config": {"9" * 5000: {"head_dim": 16}}}, "per_layer_config"),
    "rope no object": ({"rope_parameters": [[]]}, "rope_parameters must be an object"),
    "negative layer": ({"per_layer_config": {"-1": {"head_dim": 16}}}, r"per_layer_config\.-1"),
    "per layer no object": ({"per_layer_config": [1]}, "per_layer_config"),
    "uneven layers": ({"per_layer_config": {"1": {"head_dim": 16}}}, "other heads than the full_attention layers"),
    "text type": ({"model_type": "gemma3_text"}, "does not belong to gemma4"),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_refused_before_weights_are_read(tmp_path: Path, name: str) -> None:
    changes, message = VARIANTS[name]
    snapshot = without_weights(tmp_path, "gemma4", lambda text: text | changes)
    with pytest.raises(LoadError, match=message):
        ScoringEngine.load(engine_config(snapshot))


@pytest.mark.parametrize("model_type", ["gemma4_text", "gemma4"])
def test_absent_per_layer_inputs_mean_e2b(tmp_path: Path, model_type: str) -> None:
    """The reference's default for `gemma4` is 256: a config without the key is no 31B."""
    drop = {"hidden_size_per_layer_input"}
    snapshot = without_weights(tmp_path, model_type, lambda text: {k: v for k, v in text.items() if k not in drop})
    with pytest.raises(LoadError, match="per-layer input embeddings"):
        ScoringEngine.load(engine_config(snapshot))


def test_spelling_of_both_kinds_means_the_explicit_one(tmp_path: Path) -> None:
    """As in the reference: `per_layer_config` makes the `global_*` keys void, even where it is empty."""
    from transformers import AutoConfig

    snapshot = make_tiny_gemma4(tmp_path / "snapshot")
    edit_text(snapshot, lambda text: text | {"per_layer_config": {"01": {"head_dim": 32}, "3": {"head_dim": 32}}})
    theirs = AutoConfig.from_pretrained(snapshot).per_layer_config[1]
    ours = model_config(snapshot).layouts[FULL]
    assert (ours.head_dim, ours.num_kv_heads) == (theirs.head_dim, theirs.num_key_value_heads) == (32, 2)
    edit_text(snapshot, lambda text: text | {"per_layer_config": {}})
    assert model_config(snapshot).layouts[FULL].head_dim == 8


@pytest.mark.parametrize("model_type", FORMS)
def test_other_sizes_than_the_weights_are_refused(tmp_path: Path, model_type: str) -> None:
    snapshot = make_tiny_gemma4(tmp_path / "snapshot", model_type=model_type)
    edit_text(snapshot, lambda text: text | {"global_head_dim": 32})
    with pytest.raises(LoadError, match=r"1\.self_attn\.k_norm\.weight has shape \[16\], expected \[32\]"):
        ScoringEngine.load(engine_config(snapshot))


def _edit_weights(snapshot: Path, edit: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    tensors = edit(load_file(snapshot / "model.safetensors"))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, snapshot / "model.safetensors")


def test_a_value_projection_of_its_own_where_k_is_v(tmp_path: Path) -> None:
    """Some converters write k_proj a second time, as v_proj. Other values would not be read by the reference either."""
    snapshot = make_tiny_gemma4(tmp_path / "snapshot")
    key, value = (f"model.layers.1.self_attn.{name}_proj.weight" for name in "kv")
    _edit_weights(snapshot, lambda tensors: tensors | {value: tensors[key].clone()})
    ScoringEngine.load(engine_config(snapshot)).close()
    _edit_weights(snapshot, lambda tensors: tensors | {value: tensors[key] * 2})
    with pytest.raises(LoadError, match=r"1\.self_attn\.v_proj\.weight one with model\.layers\.1\.self_attn\.k_proj"):
        ScoringEngine.load(engine_config(snapshot))


def test_a_value_projection_of_no_layer(tmp_path: Path) -> None:
    snapshot = make_tiny_gemma4(tmp_path / "snapshot")
    _edit_weights(snapshot, lambda tensors: tensors | {"model.layers.5.self_attn.v_proj.weight": torch.zeros(16, 64)})
    with pytest.raises(LoadError, match=r"no place for: model\.layers\.5\.self_attn\.v_proj\.weight"):
        ScoringEngine.load(engine_config(snapshot))


def test_a_missing_layer_scalar(tmp_path: Path) -> None:
    snapshot = make_tiny_gemma4(tmp_path / "snapshot")
    name = "model.layers.2.layer_scalar"
    _edit_weights(snapshot, lambda tensors: {k: v for k, v in tensors.items() if k != name})
    with pytest.raises(LoadError, match=f"lacks 1 weights: {name}"):
        ScoringEngine.load(engine_config(snapshot))


@pytest.mark.parametrize("model_type", ["gemma4_text", "gemma4"])
def test_a_tied_head_may_be_stored_again_but_no_other(tmp_path: Path, model_type: str) -> None:
    snapshot = make_tiny_gemma4(tmp_path / "snapshot", model_type=model_type)
    embedding = f"{FORMS[model_type][1]}embed_tokens.weight"
    _edit_weights(snapshot, lambda tensors: tensors | {"lm_head.weight": tensors[embedding].clone()})
    ScoringEngine.load(engine_config(snapshot)).close()
    _edit_weights(snapshot, lambda tensors: tensors | {"lm_head.weight": tensors[embedding] * 1.5})
    with pytest.raises(LoadError, match=r"makes lm_head\.weight one with .*embed_tokens\.weight, but"):
        ScoringEngine.load(engine_config(snapshot))


def test_tie_of_the_text_part_alone(tmp_path: Path) -> None:
    snapshot = make_tiny_gemma4(tmp_path / "snapshot", model_type="gemma4")
    config = json.loads((snapshot / "config.json").read_text())
    del config["tie_word_embeddings"]
    config["text_config"]["tie_word_embeddings"] = False
    with pytest.raises(LoadError, match="tie_word_embeddings"):
        model_config(write_config(snapshot, config))
    assert model_config(write_config(snapshot, config | {"tie_word_embeddings": True})).tied_head
