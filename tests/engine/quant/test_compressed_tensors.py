"""Static fp8 checkpoints: what is read, and that everything else is refused with the name of what is wrong."""

import copy
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.quant.support import WEIGHTS, bf16_checkpoint, change, exported
from workers.engine.errors import LoadError
from workers.engine.models import GemmaModel, model_config
from workers.engine.quant.compressed_tensors import Fp8Static, to_json
from workers.engine.weights import load_weights

DOWN = "model.layers.1.mlp.down_proj"
SCALE, INPUT, WEIGHT = f"{DOWN}.weight_scale", f"{DOWN}.input_scale", f"{DOWN}.weight"
E4M3 = torch.float8_e4m3fn
Change = Callable[[dict[str, Any]], Any]


@pytest.fixture(scope="module")
def static(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint in static fp8, one file. Read-only: `snapshot` is a copy of it."""
    folder = tmp_path_factory.mktemp("static")
    return exported(bf16_checkpoint(folder / "source"), folder / "static")[0]


@pytest.fixture
def snapshot(static: Path, tmp_path: Path) -> Path:
    return shutil.copytree(static, tmp_path / "snapshot")


def load(snapshot: Path) -> GemmaModel:
    model = GemmaModel(model_config(snapshot))
    load_weights(model, snapshot)
    return model


def test_linears_are_read_as_codes_times_scale(static: Path) -> None:
    stored = load_file(static / WEIGHTS)
    model = load(static)
    expected = stored[WEIGHT].float() * stored[SCALE]
    assert torch.equal(model.model.layers[1].mlp.down_proj.weight, expected)
    query = "model.layers.0.self_attn.q_proj"
    fused = model.model.layers[0].self_attn.qkv_proj.weight
    expected = stored[f"{query}.weight"].float() * stored[f"{query}.weight_scale"]
    assert torch.equal(fused[: len(expected)], expected)
    assert torch.equal(model.model.embed_tokens.weight, stored["model.embed_tokens.weight"].float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_may_be_stored_in_another_float_type(snapshot: Path, dtype: torch.dtype) -> None:
    change(snapshot, {SCALE: torch.tensor([0.0078125], dtype=dtype)})
    stored = load_file(snapshot / WEIGHTS)
    assert torch.equal(load(snapshot).model.layers[1].mlp.down_proj.weight, stored[WEIGHT].float() * 0.0078125)


BAD_SCALES = {
    "missing": (None, "is missing"),
    "zero": (torch.tensor([0.0]), "positive and finite"),
    "negative": (torch.tensor([-0.01]), "positive and finite"),
    "nan": (torch.tensor([math.nan]), "positive and finite"),
    "infinite": (torch.tensor([math.inf]), "positive and finite"),
    "overflowing": (torch.tensor([1e37]), "positive and finite"),
    "scalar": (torch.tensor(0.01), "expected [1]"),
    "two": (torch.tensor([0.01, 0.01]), "expected [1]"),
    "empty": (torch.zeros(0), "expected [1]"),
    "per channel": (torch.full((64, 1), 0.01), "expected [1]"),
    "double": (torch.tensor([0.01], dtype=torch.float64), "F64"),
    "whole": (torch.tensor([1]), "I64"),
    "fp8": (torch.tensor([1.0]).to(E4M3), "F8_E4M3"),
}


@pytest.mark.parametrize("name", [SCALE, INPUT], ids=["weight_scale", "input_scale"])
@pytest.mark.parametrize("case", BAD_SCALES)
def test_malformed_scales_are_refused_by_name(snapshot: Path, name: str, case: str) -> None:
    value, message = BAD_SCALES[case]
    change(snapshot, {name: value})
    with pytest.raises(LoadError) as refused:
        load(snapshot)
    assert name in str(refused.value)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight_scale",
        "model.norm.weight_scale",
        "lm_head.weight_scale",
        "lm_head.input_scale",
        "model.layers.9.mlp.down_proj.weight_scale",
        f"{DOWN}.weight_zero_point",
        f"{DOWN}.output_scale",
        f"{DOWN}.weight_scale_inv",
        "model.layers.0.self_attn.k_scale",
        "model.vision_tower.layers.0.fc1.weight_scale",
    ],
)
@pytest.mark.parametrize("quantized", [True, False])
def test_scales_that_belong_to_nothing_are_refused(tmp_path: Path, static: Path, name: str, quantized: bool) -> None:
    snapshot = shutil.copytree(static, tmp_path / "s") if quantized else bf16_checkpoint(tmp_path / "s")
    change(snapshot, {name: torch.tensor([0.5])})
    with pytest.raises(LoadError, match=name):
        load(snapshot)


@pytest.mark.parametrize("ending", ["bias", "weight_scales", "scale", "lora_A"])
def test_what_else_is_stored_of_a_quantized_linear_is_refused(snapshot: Path, ending: str) -> None:
    """It would change the scores where it is read, as a bias does."""
    change(snapshot, {f"{DOWN}.{ending}": torch.ones(64)})
    with pytest.raises(LoadError, match=rf"no place for: {DOWN}\.{ending}"):
        load(snapshot)


def test_scales_of_a_vision_tower_do_not_pass_as_unread(tmp_path: Path, static: Path) -> None:
    snapshot = shutil.copytree(static, tmp_path / "s")
    change(snapshot, {"model.vision_tower.fc1.weight": torch.zeros(4, 4).to(E4M3)})
    with pytest.raises(LoadError, match=r"model\.vision_tower\.fc1\.weight has type F8_E4M3"):
        load(snapshot)


WEIGHTS_GONE_WRONG = {
    "in full precision": (torch.zeros(64, 128, dtype=torch.bfloat16), "BF16"),
    "other fp8": (torch.zeros(64, 128).to(torch.float8_e5m2), "F8_E5M2"),
    "int8": (torch.zeros(64, 128, dtype=torch.int8), "I8"),
    "wrong shape": (torch.zeros(64, 127).to(E4M3), "expected [64, 128]"),
    "not a number": (torch.full((64, 128), math.nan).to(E4M3), "not a number"),
    "minus not a number": (torch.full((64, 128), 255, dtype=torch.uint8).view(E4M3), "not a number"),
}


@pytest.mark.parametrize("case", WEIGHTS_GONE_WRONG)
def test_malformed_weights_are_refused_by_name(snapshot: Path, case: str) -> None:
    value, message = WEIGHTS_GONE_WRONG[case]
    change(snapshot, {WEIGHT: value})
    with pytest.raises(LoadError) as refused:
        load(snapshot)
    assert WEIGHT in str(refused.value)
    assert message in str(refused.value)


def test_a_missing_weight_is_refused_by_name(snapshot: Path) -> None:
    change(snapshot, {WEIGHT: None})
    with pytest.raises(LoadError, match=r"lacks 1 weights: model\.layers\.1\.mlp\.down_proj"):
        load(snapshot)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.norm.weight"])
def test_only_linears_of_the_decoder_may_be_fp8(snapshot: Path, name: str) -> None:
    tensor = load_file(snapshot / WEIGHTS)[name]
    change(snapshot, {name: tensor.float().clamp(-400, 400).to(E4M3)})
    with pytest.raises(LoadError, match=name):
        load(snapshot)


def test_fp8_weights_without_a_declaration_are_refused(snapshot: Path) -> None:
    scales = [name for name in load_file(snapshot / WEIGHTS) if name.endswith("_scale")]
    change(snapshot, dict.fromkeys(scales), {"quantization_config": None})
    with pytest.raises(LoadError, match=r"has type F8_E4M3, but config\.json does not declare it quantized"):
        load(snapshot)


def edited(edit: Change) -> dict[str, Any]:
    config = copy.deepcopy(to_json(["lm_head"]))
    edit(config)
    return config


def group(config: dict[str, Any]) -> dict[str, Any]:
    return config["config_groups"]["group_0"]  # type: ignore[no-any-return]


REFUSED_CONFIGS: dict[str, tuple[Change, str]] = {
    "gptq": (lambda c: c.update(quant_method="gptq"), "quant_method 'gptq'"),
    "no method": (lambda c: c.pop("quant_method"), "quant_method None"),
    "int format": (lambda c: c.update(format="int-quantized"), "format 'int-quantized'"),
    "pack format": (lambda c: c.update(format="pack-quantized"), "format 'pack-quantized'"),
    "group format": (lambda c: group(c).update(format="nvfp4-pack-quantized"), "group_0.format"),
    "half done": (lambda c: c.update(quantization_status="initialized"), "quantization_status 'initialized'"),
    "cache": (lambda c: c.update(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
    "sparse": (lambda c: c.update(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config"),
    "rotated": (lambda c: c.update(transform_config={"config_groups": {"r1": {}}}), "transform_config"),
    "no group": (lambda c: c.update(config_groups={}), "config_groups"),
    "groups missing": (lambda c: c.pop("config_groups"), "config_groups"),
    "groups as a list": (lambda c: c.update(config_groups=[group(c)]), "config_groups"),
    "group null": (lambda c: c["config_groups"].update(group_0=None), "group_0 must be an object"),
    "second group": (
        lambda c: c["config_groups"].update(group_1={**group(c), "weights": {**group(c)["weights"], "num_bits": 4}}),
        "group_1.weights.num_bits 4",
    ),
    "four bits": (lambda c: group(c)["weights"].update(num_bits=4), "weights.num_bits 4"),
    "bits as text": (lambda c: group(c)["weights"].update(num_bits="8"), "weights.num_bits '8'"),
    "bits as a fraction": (lambda c: group(c)["weights"].update(num_bits=8.0), "weights.num_bits 8.0"),
    "no for a number": (lambda c: group(c)["weights"].update(dynamic=0), "weights.dynamic 0"),
    "int weights": (lambda c: group(c)["weights"].update(type="int"), "weights.type 'int'"),
    "channel": (lambda c: group(c)["weights"].update(strategy="channel"), "weights.strategy 'channel'"),
    "block": (lambda c: group(c)["weights"].update(block_structure=[128, 128]), "weights.block_structure"),
    "groupwise": (lambda c: group(c)["weights"].update(group_size=128), "weights.group_size 128"),
    "asymmetric": (lambda c: group(c)["weights"].update(symmetric=False), "weights.symmetric False"),
    "dynamic weights": (lambda c: group(c)["weights"].update(dynamic=True), "weights.dynamic True"),
    "dynamic inputs": (lambda c: group(c)["input_activations"].update(dynamic=True), "input_activations.dynamic True"),
    "token": (lambda c: group(c)["input_activations"].update(strategy="token"), "input_activations.strategy 'token'"),
    "weights only": (lambda c: group(c).update(input_activations=None), "input_activations None"),
    "no weights": (lambda c: group(c).pop("weights"), "weights None"),
    "outputs": (lambda c: group(c).update(output_activations={"num_bits": 8}), "output_activations"),
    "no target": (lambda c: group(c).update(targets=[]), "targets is empty"),
    "targets as text": (lambda c: group(c).update(targets="Linear"), "targets must be a list"),
    "ignore as text": (lambda c: c.update(ignore="lm_head"), "ignore must be a list"),
    "ignore of numbers": (lambda c: c.update(ignore=[3]), "ignore must be a list"),
    "bad pattern": (lambda c: c.update(ignore=["re:("]), "is not a pattern"),
    "ignored linear": (lambda c: c.update(ignore=["lm_head", DOWN]), f"ignores {DOWN}, which is stored quantized"),
    "ignored by pattern": (lambda c: c.update(ignore=["re:.*down_proj$"]), "ignores model.layers.0.mlp.down_proj"),
    "everything ignored": (lambda c: c.update(ignore=["Linear"]), "ignores model.layers"),
    "not targeted": (lambda c: group(c).update(targets=["re:.*self_attn.*"]), "does not target model.layers.0.mlp"),
}


@pytest.mark.parametrize("case", REFUSED_CONFIGS)
def test_other_schemes_and_contradictions_are_refused(snapshot: Path, case: str) -> None:
    edit, message = REFUSED_CONFIGS[case]
    change(snapshot, {}, {"quantization_config": edited(edit)})
    with pytest.raises(LoadError) as refused:
        load(snapshot)
    assert message in str(refused.value)


def test_an_ignored_linear_in_full_precision_is_refused(snapshot: Path) -> None:
    tensors = {WEIGHT: torch.zeros(64, 128), SCALE: None, INPUT: None}
    change(snapshot, tensors, {"quantization_config": edited(lambda c: c.update(ignore=[DOWN]))})
    with pytest.raises(LoadError, match=f"ignores {DOWN}, but static fp8 needs every linear"):
        load(snapshot)


def test_a_head_in_full_must_be_ignored(snapshot: Path) -> None:
    head = load_file(snapshot / WEIGHTS)["model.embed_tokens.weight"].clone()
    change(snapshot, {"lm_head.weight": head}, {"tie_word_embeddings": False})
    load(snapshot)
    change(snapshot, {}, {"quantization_config": to_json([])})
    with pytest.raises(LoadError, match="does not ignore lm_head"):
        load(snapshot)


@pytest.mark.parametrize("value", [3, "fp8", [], True])
def test_quantization_config_must_be_an_object(snapshot: Path, value: Any) -> None:
    change(snapshot, {}, {"quantization_config": value})
    with pytest.raises(LoadError, match="must be an object"):
        load(snapshot)


ACCEPTED_CONFIGS: dict[str, Change] = {
    "as we write it": lambda c: None,
    "frozen": lambda c: c.update(quantization_status="frozen"),
    "bare": lambda c: [c.pop(key) for key in ("quantization_status", "ignore", "kv_cache_scheme")],
    "with what others add": lambda c: c.update(
        version="0.12.2", global_compression_ratio=1.4, sparsity_config={}, transform_config={}
    ),
    "dense": lambda c: c.update(sparsity_config={"format": "dense"}),
    "group without format": lambda c: group(c).pop("format"),
    "by pattern": lambda c: group(c).update(targets=["re:model\\.layers\\..*_proj"]),
    "two groups": lambda c: c["config_groups"].update(
        group_0={**group(c), "targets": ["re:.*mlp"]}, group_1={**group(c), "targets": ["re:.*self_attn"]}
    ),
    "ignore that matches nothing": lambda c: c.update(ignore=["re:.*vision.*", "visual", "down_proj"]),
}


@pytest.mark.parametrize("case", ACCEPTED_CONFIGS)
def test_other_spellings_of_the_same_are_read(snapshot: Path, case: str) -> None:
    change(snapshot, {}, {"quantization_config": edited(ACCEPTED_CONFIGS[case])})
    load(snapshot)


def multimodal(snapshot: Path, *, inner: dict[str, Any] | None, outer: dict[str, Any] | None) -> Path:
    """The text snapshot as the language model of a multimodal one."""
    text = json.loads((snapshot / "config.json").read_text())
    text["quantization_config"] = inner
    whole = {"model_type": "gemma3", "text_config": text, "quantization_config": outer, "tie_word_embeddings": True}
    (snapshot / "config.json").write_text(json.dumps(whole))
    tensors = {
        name.replace("model.", "model.language_model.", 1): t for name, t in load_file(snapshot / WEIGHTS).items()
    }
    tensors["model.vision_tower.fc1.weight"] = torch.zeros(4, 4)
    save_file(tensors, snapshot / WEIGHTS, {"format": "pt"})
    return snapshot


@pytest.mark.parametrize("place", ["outer", "inner", "both"])
def test_multimodal_checkpoints(snapshot: Path, static: Path, place: str) -> None:
    config = to_json(["lm_head", "model.vision_tower.fc1"])
    places = {"outer": config if place != "inner" else None, "inner": config if place != "outer" else None}
    model, text = load(multimodal(snapshot, **places)), load(static)
    for (_, ours), (_, theirs) in zip(model.named_parameters(), text.named_parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_two_declarations_that_differ_are_refused(snapshot: Path) -> None:
    multimodal(snapshot, inner=to_json([]), outer=to_json(["lm_head"]))
    with pytest.raises(LoadError, match="differs"):
        load(snapshot)


def test_a_multimodal_ignore_list_names_stored_or_text_modules(snapshot: Path) -> None:
    ignored = "model.language_model.layers.1.mlp.down_proj"
    multimodal(snapshot, inner=None, outer=to_json(["lm_head", ignored]))
    with pytest.raises(LoadError, match=f"ignores {ignored}"):
        load(snapshot)


def test_plain_configs_are_not_quantized() -> None:
    assert Fp8Static.from_json({"model_type": "gemma3_text", "quantization_config": None}) is None
    assert Fp8Static.from_json({"model_type": "gemma3", "text_config": {}}) is None
