"""From full precision to static fp8: equal to quantizing at load time, whole or not there, what is kept and marked."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.engine.quant.support import (
    WEIGHTS,
    bf16_checkpoint,
    change,
    dequantized,
    engine_of,
    exported,
    same_bits,
    scheme_model,
    some_amax,
    write_calibration,
)  # fmt: skip
from tests.engine.support import engine_config, make_plan, random_jobs, score
from tests.support.tiny import make_tiny_checkpoint
from tests.support.tiny_gemma4 import make_tiny_gemma4
from workers.engine import export
from workers.engine.engine import ScoringEngine
from workers.engine.errors import LoadError
from workers.engine.export import export_fp8, source_of
from workers.engine.quant import reference
from workers.engine.quant.calibration import Calibration, read_calibration
from workers.engine.shards import INDEX


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bf16, one file. Read-only."""
    return bf16_checkpoint(tmp_path_factory.mktemp("source") / "tiny")


@pytest.fixture(scope="module")
def static(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Calibration]:
    return exported(source, tmp_path_factory.mktemp("static") / "static")


@pytest.fixture
def calibration(source: Path, tmp_path: Path) -> Calibration:
    return read_calibration(write_calibration(source, tmp_path / "calibration.json"))


def logprobs(engine: ScoringEngine) -> Any:
    """Every read of a job that is split over passes, packed with two others."""
    plan, _ = make_plan(random_jobs(11, 700, (150, 5, 40), 12))
    out = score(engine, plan).logprobs
    engine.close()
    return out


def sharded(folder: Path) -> Path:
    return bf16_checkpoint(folder, shards=3)


def gemma4(folder: Path) -> Path:
    """A multimodal one: layers with and without a value projection, media tensors of their own."""
    return make_tiny_gemma4(folder, model_type="gemma4_unified", shards=2)


SOURCES = {"bf16": bf16_checkpoint, "f32": make_tiny_checkpoint, "shards": sharded, "gemma4": gemma4}


@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)
def test_export_then_load_is_quantizing_at_load_time(tmp_path: Path, make: Any) -> None:
    source = make(tmp_path / "source")
    static, calibration = exported(source, tmp_path / "static")
    from_export = logprobs(ScoringEngine.load(engine_config(static)))
    at_load = logprobs(engine_of(source, dequantized(scheme_model(source, "fp8s", calibration))))
    assert same_bits(from_export, at_load)
    plain = logprobs(ScoringEngine.load(engine_config(source)))
    assert not same_bits(from_export, plain)
    assert float(np.abs(from_export - plain).max()) > 0.01


def test_the_same_holds_in_bf16(source: Path, static: tuple[Path, Calibration]) -> None:
    snapshot, calibration = static
    from_export = logprobs(ScoringEngine.load(engine_config(snapshot, quant="bf16")))
    model = dequantized(scheme_model(source, "fp8s", calibration, torch.bfloat16))
    assert same_bits(from_export, logprobs(engine_of(source, model, quant="bf16")))
    assert not same_bits(from_export, logprobs(ScoringEngine.load(engine_config(snapshot))))


def test_the_same_holds_with_rounded_activations(source: Path, static: tuple[Path, Calibration]) -> None:
    snapshot, calibration = static
    stored = logprobs(engine_of(snapshot, scheme_model(snapshot, "fp8s")))
    at_load = logprobs(engine_of(source, scheme_model(source, "fp8s", calibration)))
    assert same_bits(stored, at_load)
    assert not same_bits(stored, logprobs(ScoringEngine.load(engine_config(snapshot))))


@pytest.mark.parametrize("scheme", ["fp8", "fp8row", "w8a16", "w8a8"])
def test_every_scheme_runs_from_either_checkpoint(source: Path, static: tuple[Path, Calibration], scheme: str) -> None:
    """Codes of another kind are made from the dequantized rows; the dynamic scheme takes the stored codes."""
    from_static = logprobs(engine_of(static[0], scheme_model(static[0], scheme)))
    at_load = logprobs(engine_of(source, scheme_model(source, scheme)))
    assert same_bits(from_static, at_load) == (scheme == "fp8")
    assert np.isfinite(from_static).all()


def test_fp8s_needs_scales(source: Path) -> None:
    with pytest.raises(LoadError, match="input_scale"):
        scheme_model(source, "fp8s")


def test_stored_tensors(source: Path, static: tuple[Path, Calibration]) -> None:
    before, after = load_file(source / WEIGHTS), load_file(static[0] / WEIGHTS)
    linears = {name.removesuffix(".weight") for name in before if name.endswith("_proj.weight")}
    assert len(linears) == 21
    for name in linears:
        weight = before.pop(f"{name}.weight").float()
        scale = (weight.abs().max() / 448).reshape(1)
        assert torch.equal(after.pop(f"{name}.weight_scale"), scale)
        assert after.pop(f"{name}.input_scale").tolist() == [static[1].scales[name]]
        codes = after.pop(f"{name}.weight")
        assert codes.dtype == torch.float8_e4m3fn
        assert torch.equal(codes.float(), reference.e4m3(weight / scale))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) and after[name].dtype == torch.bfloat16 for name in before)


def test_each_shard_becomes_one_shard(tmp_path: Path) -> None:
    source = bf16_checkpoint(tmp_path / "source", shards=3)
    static, _ = exported(source, tmp_path / "static")
    index, old = (json.loads((folder / INDEX).read_text()) for folder in (static, source))
    sizes, names = 0, set()
    for path in sorted(static.glob("*.safetensors")):
        tensors = load_file(path)
        names |= tensors.keys()
        sizes += sum(t.numel() * t.element_size() for t in tensors.values())
        assert all(index["weight_map"][name] == path.name for name in tensors)
    assert names == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sizes
    assert all(index["weight_map"][name] == file for name, file in old["weight_map"].items())


def test_config_differs_by_one_entry(source: Path, static: tuple[Path, Calibration]) -> None:
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, static[0]))
    entry = after.pop("quantization_config")
    assert before == after
    assert entry["quant_method"] == "compressed-tensors"
    assert entry["ignore"] == ["lm_head", "model.embed_tokens"]


def test_a_second_export_has_the_same_bytes(source: Path, static: tuple[Path, Calibration], tmp_path: Path) -> None:
    export_fp8(source, tmp_path / "again", static[1])
    names = sorted(path.name for path in static[0].iterdir())
    assert names == sorted(path.name for path in (tmp_path / "again").iterdir())
    for name in names:
        assert (static[0] / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name


def test_notices_are_kept_and_changes_marked(tmp_path: Path) -> None:
    source = bf16_checkpoint(tmp_path / "source", shards=2)
    texts = {"LICENSE": "Apache 2.0", "NOTICE": "Made by others.", "README.md": "# Theirs", "USE_POLICY.md": "Be good."}
    for name, text in texts.items():
        (source / name).write_text(text)
    (source / "other.bin").write_bytes(b"weights of another form")
    (source / ".cache").mkdir()
    (tmp_path / "card.md").write_text("# Ours")
    calibration = read_calibration(write_calibration(source, tmp_path / "c.json"))
    target = tmp_path / "target"
    export_fp8(source, target, calibration, name="them/model", card=tmp_path / "card.md")
    for name in ("LICENSE", "USE_POLICY.md", "tokenizer.json", "tokenizer_config.json"):
        assert (target / name).read_bytes() == (source / name).read_bytes()
    assert ((target / "README.md").read_text(), (target / "README.source.md").read_text()) == ("# Ours", "# Theirs")
    assert not (target / "other.bin").exists()
    notice = (target / "NOTICE").read_text()
    assert notice.startswith("Made by others.\n\n")
    shards = sorted(path.name for path in target.glob("*.safetensors"))
    changed = ["config.json", *shards, INDEX]
    assert all(f"  {name}\n" in notice.split("Files kept")[0] for name in changed)
    for name in shards:
        with safe_open(target / name, "pt") as shard:
            assert "changed" in shard.metadata()["spinf_quantize"]
            assert "them/model" in shard.metadata()["spinf_quantize"]
    record = json.loads((target / "spinf_quantize.json").read_text())
    assert record["changed"] == changed
    assert record["source"] == {"name": "them/model", "revision": calibration.weights_digest,
                                "weights": calibration.weights_digest}  # fmt: skip
    assert record["calibration"]["sha256"] == hashlib.sha256((tmp_path / "c.json").read_bytes()).hexdigest()
    assert {"LICENSE", "NOTICE", "README.source.md"} < set(record["kept"])
    assert record["tools"].keys() == {"spinf_serve", "torch", "python"}


def test_a_source_without_a_licence_is_pointed_out(source: Path, calibration: Calibration, tmp_path: Path) -> None:
    lines: list[str] = []
    export_fp8(source, tmp_path / "target", calibration, on_progress=lines.append)
    assert any("no licence" in line for line in lines)


def test_the_revision_of_a_hub_snapshot(source: Path, tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = shutil.copytree(source, tmp_path / "models--google--gemma-tiny" / "snapshots" / commit)
    found = source_of(snapshot)
    assert (found.name, found.revision) == ("google/gemma-tiny", commit)
    assert found.weights == source_of(source).weights


@pytest.mark.parametrize("kind", ["directory", "empty", "file", "link"])
def test_nothing_is_overwritten(source: Path, calibration: Calibration, tmp_path: Path, kind: str) -> None:
    target = tmp_path / "target"
    match kind:
        case "directory":
            shutil.copytree(source, target)
        case "empty":
            target.mkdir()
        case "file":
            target.write_text("mine")
        case _:
            target.symlink_to("nowhere")
    with pytest.raises(LoadError, match="exists already"):
        export_fp8(source, target, calibration)
    assert not target.exists() or target.is_file() or "spinf_quantize.json" not in os.listdir(target)


def _fail_late(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_arguments: Any) -> None:
        raise error

    monkeypatch.setattr(export, "_write_notice", fail)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), RuntimeError("bug")])
def test_a_failed_export_leaves_nothing(
    source: Path, calibration: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    _fail_late(monkeypatch, error)
    folder = tmp_path / "out"
    with pytest.raises((LoadError, type(error))):
        export_fp8(source, folder / "target", calibration)
    assert list(folder.iterdir()) == []


def test_a_target_that_appears_meanwhile_stays(
    source: Path, calibration: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, write = tmp_path / "out" / "target", export._write_notice

    def race(*arguments: Any) -> None:
        write(*arguments)
        target.mkdir()
        (target / "mine").write_text("mine")

    monkeypatch.setattr(export, "_write_notice", race)
    with pytest.raises(LoadError, match="cannot be written"):
        export_fp8(source, target, calibration)
    assert [path.name for path in (tmp_path / "out").rglob("*")] == ["target", "mine"]


def test_a_full_disk_is_seen_before_anything_is_written(
    source: Path, calibration: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: shutil._ntuple_diskusage(10, 9, 1))  # type: ignore[attr-defined]
    with pytest.raises(LoadError, match="GB free"):
        export_fp8(source, tmp_path / "target", calibration)


@pytest.fixture
def copy(source: Path, tmp_path: Path) -> Iterator[Path]:
    return shutil.copytree(source, tmp_path / "copy")  # type: ignore[return-value]


def refused(snapshot: Path, folder: Path, calibration: Calibration | None = None) -> str:
    """The message of an export that must be refused and must write nothing."""
    amax = some_amax(snapshot)
    made = calibration or read_calibration(write_calibration(snapshot, folder / "refused.json", amax))
    with pytest.raises(LoadError) as error:
        export_fp8(snapshot, folder / "refused", made)
    assert not (folder / "refused").exists()
    return str(error.value)


def test_calibrations_of_other_weights_are_refused(copy: Path, calibration: Calibration, tmp_path: Path) -> None:
    change(copy, {"model.norm.weight": load_file(copy / WEIGHTS)["model.norm.weight"] * 2})
    assert "other weights" in refused(copy, tmp_path, calibration)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_by_name(copy: Path, tmp_path: Path, bad: float) -> None:
    name = "model.layers.2.mlp.up_proj.weight"
    weight = load_file(copy / WEIGHTS)[name]
    weight[100, 3] = bad
    change(copy, {name: weight})
    assert name in refused(copy, tmp_path)


def test_quantized_sources_are_refused(static: tuple[Path, Calibration], tmp_path: Path) -> None:
    assert "quantized already" in refused(static[0], tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.layers.0.mlp.up_proj.weight": None}, "lacks 1 weights: model.layers.0.mlp.up_proj"),
        ({"model.layers.0.mlp.up_proj.weight": torch.zeros(3, 64)}, "model.layers.0.mlp.up_proj.weight has shape"),
        ({"model.layers.0.mlp.up_proj.weight": torch.zeros(128, 64, dtype=torch.int8)}, "has type I8"),
        ({"model.layers.0.mlp.up_proj.weight_scale": torch.ones(1)}, "model.layers.0.mlp.up_proj.weight_scale"),
        ({"model.norm.weight": torch.zeros(64).to(torch.float8_e4m3fn)}, "model.norm.weight has type F8_E4M3"),
    ],
    ids=["missing", "shape", "type", "scale", "fp8"],
)
def test_sources_that_cannot_be_served_are_refused(
    copy: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    change(copy, changes)
    assert message in refused(copy, tmp_path)


def test_multimodal_sources(source: Path, tmp_path: Path) -> None:
    """The tower stays as it is and is named in the ignore list; the language model is quantized under its own names."""
    copy = shutil.copytree(source, tmp_path / "copy")
    text = json.loads((copy / "config.json").read_text())
    whole = {"model_type": "gemma3", "text_config": text, "tie_word_embeddings": True}
    (copy / "config.json").write_text(json.dumps(whole))
    tensors = {name.replace("model.", "model.language_model.", 1): t for name, t in load_file(copy / WEIGHTS).items()}
    tower = torch.ones(8, 4, dtype=torch.bfloat16)
    tensors |= {"model.vision_tower.fc1.weight": tower, "model.vision_tower.fc1.bias": torch.ones(8)}
    save_file(tensors, copy / WEIGHTS, {"format": "pt"})
    target, calibration = exported(copy, tmp_path / "target")
    stored = load_file(target / WEIGHTS)
    assert stored["model.language_model.layers.0.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn
    assert torch.equal(stored["model.vision_tower.fc1.weight"], tower)
    ignore = json.loads((target / "config.json").read_text())["quantization_config"]["ignore"]
    assert ignore == ["lm_head", "model.language_model.embed_tokens", "model.vision_tower.fc1"]
    ours = logprobs(ScoringEngine.load(engine_config(target)))
    assert same_bits(ours, logprobs(ScoringEngine.load(engine_config(exported(source, tmp_path / "text")[0]))))
    assert "model.layers.0.mlp.up_proj" in calibration.scales


def _with_tensors(source: Path, tensors: dict[str, torch.Tensor]) -> Path:
    change(source, tensors)
    return source


@pytest.mark.parametrize("model_type", ["gemma4_text", "gemma4"])
def test_a_stored_copy_of_k_is_left_out(tmp_path: Path, model_type: str) -> None:
    """As v_proj it would stay in full precision while k_proj is quantized, and be no copy any more."""
    source = make_tiny_gemma4(tmp_path / "source", model_type=model_type)
    plain = logprobs(ScoringEngine.load(engine_config(exported(source, tmp_path / "plain")[0])))
    stored = load_file(source / WEIGHTS)
    keys = [name for name in stored if name.endswith("layers.1.self_attn.k_proj.weight")]
    copies = {name.replace("k_proj", "v_proj"): stored[name].clone() for name in keys}
    assert len(copies) == 1
    static, _ = exported(_with_tensors(source, copies), tmp_path / "static")
    assert not copies.keys() & load_file(static / WEIGHTS).keys()
    record = json.loads((static / "spinf_quantize.json").read_text())
    assert record["dropped"] == [*copies]
    assert min(copies) in (static / "NOTICE").read_text().split("left out")[1]
    ignored = json.loads((static / "config.json").read_text())["quantization_config"]["ignore"]
    assert not [name for name in ignored if "v_proj" in name]
    assert same_bits(logprobs(ScoringEngine.load(engine_config(static))), plain)


def test_a_shard_of_copies_alone_is_not_written(tmp_path: Path) -> None:
    source = make_tiny_gemma4(tmp_path / "source", shards=2)
    index = json.loads((source / INDEX).read_text())
    key, value = (f"model.layers.3.self_attn.{name}_proj.weight" for name in "kv")
    save_file({value: load_file(source / index["weight_map"][key])[key]}, source / "copies.safetensors")
    index["weight_map"][value] = "copies.safetensors"
    (source / INDEX).write_text(json.dumps(index))
    static, _ = exported(source, tmp_path / "static")
    assert not (static / "copies.safetensors").exists()
    assert value not in json.loads((static / INDEX).read_text())["weight_map"]
    ScoringEngine.load(engine_config(static)).close()


BAD_SOURCES = {
    "another v": ("model.layers.1.self_attn.v_proj.weight", lambda stored: stored * 2, "stores different values"),
    "another head": ("lm_head.weight", lambda stored: torch.zeros(3, 5), "stores different values"),
    "left over": ("model.layers.9.mlp.up_proj.weight", lambda stored: stored, "has no place for"),
    "missing": ("model.layers.0.layer_scalar", lambda stored: None, "lacks 1 weights: model.layers.0.layer_scalar"),
    "norm of another size": ("model.norm.weight", lambda stored: torch.zeros(3), "model.norm.weight has shape"),
}


@pytest.mark.parametrize("name", BAD_SOURCES)
def test_what_would_not_be_served_is_not_exported(tmp_path: Path, name: str) -> None:
    source = make_tiny_gemma4(tmp_path / "source")
    tensor, edit, message = BAD_SOURCES[name]
    key = load_file(source / WEIGHTS)["model.layers.1.self_attn.k_proj.weight"].clone()
    change(source, {tensor: edit(key)})
    amax = dict.fromkeys(some_amax(make_tiny_gemma4(tmp_path / "whole")), 1.0)
    calibration = read_calibration(write_calibration(source, tmp_path / "c.json", amax))
    with pytest.raises(LoadError, match=message):
        export_fp8(source, tmp_path / "static", calibration)
    assert not [path for path in tmp_path.iterdir() if "static" in path.name]


def test_a_card_that_cannot_be_read_costs_no_hashing(source: Path, calibration: Calibration, tmp_path: Path) -> None:
    lines: list[str] = []
    for card in (tmp_path / "absent.md", tmp_path):
        with pytest.raises(LoadError, match=card.name):
            export_fp8(source, tmp_path / "target", calibration, card=card, on_progress=lines.append)
    assert lines == []


def test_names_that_are_no_text_are_written_as_text(source: Path, tmp_path: Path) -> None:
    """A file system takes any bytes; a JSON string and a notice do not."""
    odd = shutil.copytree(source, tmp_path / os.fsdecode(b"gemma-\xff"))
    (odd / os.fsdecode(b"NOTES-\xff")).write_text("x")
    calibration = read_calibration(write_calibration(odd, tmp_path / "c.json"))
    calibration.record["corpus"] = {"files": [{"name": "\ud800"}]}
    export_fp8(odd, tmp_path / "target", calibration)
    assert json.loads((tmp_path / "target/spinf_quantize.json").read_text())["source"]["name"] == "gemma-?"
