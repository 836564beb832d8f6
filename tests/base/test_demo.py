"""The demo conversion: a small GGUF file written here, and the real one."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spinf_serve import demo
from spinf_serve.bpe import bpe_merges
from tests.support.tiny import tiny_pieces

gguf = pytest.importorskip("gguf", reason="the extra `demo` is not installed")
numpy_safetensors = pytest.importorskip("safetensors.numpy", reason="the extra `server` is not installed")


@pytest.fixture(scope="module")
def small_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file with the tiny vocabulary, one layer's norm, a Q8_0 embedding and a float32 linear."""
    pieces, special, plain = tiny_pieces()
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_context_length(64)
    writer.add_uint32("gemma3.block_count", 7)
    writer.add_layer_norm_rms_eps(1e-6)
    written = [" " * len(piece) if piece == "▁" * len(piece) and len(piece) > 1 else piece for piece in pieces]
    writer.add_token_list(written)
    writer.add_token_scores([0.0] * len(pieces))
    kinds = dict.fromkeys(special, demo._CONTROL) | dict.fromkeys(plain, demo._USER_DEFINED)
    writer.add_token_types([kinds.get(piece, 1) for piece in pieces])
    writer.add_tensor("output_norm.weight", (1 + rng.standard_normal(64, np.float32) * 0.1).astype(np.float32))
    table = rng.standard_normal((len(pieces), 64), np.float32)
    quantized = gguf.quantize(table, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("token_embd.weight", quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.0.ffn_down.weight", rng.standard_normal((64, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_reader_agrees_with_the_library(small_gguf: Path) -> None:
    ours, theirs = demo._open(small_gguf), gguf.GGUFReader(small_gguf)
    assert ours.fields.keys() == theirs.fields.keys()
    tokens = theirs.fields["tokenizer.ggml.tokens"].contents()
    assert ours.fields["tokenizer.ggml.tokens"].parts[-1] == tokens
    kinds = theirs.fields["tokenizer.ggml.token_type"].contents()
    assert ours.fields["tokenizer.ggml.token_type"].parts[-1].tolist() == kinds
    assert ours.fields["gemma3.block_count"].contents() == 7
    for mine, other in zip(ours.tensors, theirs.tensors, strict=True):
        assert (mine.name, mine.tensor_type) == (other.name, other.tensor_type)
        assert np.array_equal(mine.data, other.data)


def test_weights_are_the_numbers_of_the_file(small_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_ROWS", 100)  # several blocks per tensor, the last one short
    told: list[str] = []
    demo.write_weights(tmp_path / "model.safetensors", demo._open(small_gguf), told.append)
    weights = numpy_safetensors.load_file(tmp_path / "model.safetensors")
    assert told[-1].endswith("100 %")
    for tensor in gguf.GGUFReader(small_gguf).tensors:
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        stored = weights.pop(demo.hf_name(tensor.name))
        applied = np.float32(1) + stored if "norm" in tensor.name else stored
        assert applied.dtype == np.float32
        assert np.array_equal(applied, expected), tensor.name
    assert not weights


def test_the_tokenizer_is_rebuilt_from_the_vocabulary(small_gguf: Path, tmp_path: Path, tiny_checkpoint: Path) -> None:
    pieces = demo.write_tokenizer(tmp_path, demo._open(small_gguf))
    assert tuple(pieces) == tiny_pieces()[0]  # runs of spaces are ▁ again
    rebuilt = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    assert rebuilt == json.loads((tiny_checkpoint / "tokenizer.json").read_text(encoding="utf-8"))


def test_a_norm_that_would_change_is_refused() -> None:
    assert np.array_equal(demo._stored_norm("n", np.array([1.25, 0.5, 40.0], np.float32)), [0.25, -0.5, 39.0])
    with pytest.raises(ValueError, match=r"blk\.0\.attn_norm"):
        demo._stored_norm("blk.0.attn_norm", np.array([1e-9], np.float32))


@pytest.mark.parametrize(
    "name", ["blk.0.attn_q.bias", "rope_freqs.weight", "blk.0.ssm_a.weight", "output.weight", "blk.0"]
)
def test_unknown_tensors_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="unknown tensor"):
        demo.hf_name(name)


def test_names_agree_with_the_librarys_own_table() -> None:
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, 1)
    names = ["token_embd", "output_norm", *(f"blk.0.{name}" for name in demo._TENSORS)]
    for name in names:
        assert table.get_name(demo.hf_name(f"{name}.weight").removesuffix(".weight")) == name


def test_merges_are_ranked_by_the_merged_id_then_by_the_longest_left_half() -> None:
    vocab = {piece: index for index, piece in enumerate(["a", "b", "c", "ab", "bc", "abc", "\n", "\n\n", "\n\n\n"])}
    runs = [("\n\n", "\n"), ("\n", "\n\n"), ("\n", "\n")]
    assert bpe_merges(vocab) == [*runs, ("a", "b"), ("b", "c"), ("ab", "c"), ("a", "bc")]


def test_a_package_of_another_model_is_refused(
    small_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(small_gguf.read_bytes().replace(b"gemma3", b"llama3"))
    monkeypatch.setattr(demo, "_assemble", lambda _work: other)
    with pytest.raises(ValueError, match="expected a gemma3 model, found 'llama3'"):
        demo.convert_demo(tmp_path / "target")
    assert not list((tmp_path / "target").iterdir())


def test_an_interrupted_conversion_is_no_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(demo.PACKAGE, reason="the extra `demo` is not installed")

    def stop(message: str) -> None:
        if message.startswith("dequantizing"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo.convert_demo(tmp_path, stop)
    assert not (tmp_path / "config.json").exists()
    assert not list(tmp_path.glob(".gguf-*"))


def test_the_demo_snapshot(demo_snapshot: Path) -> None:
    config: dict[str, Any] = json.loads((demo_snapshot / "config.json").read_text(encoding="utf-8"))
    expected = {
        "vocab_size": 262_144, "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512,
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    }  # fmt: skip
    assert config | expected == config
    assert [i for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"] == [5, 11, 17]
    assert config["rope_parameters"]["sliding_attention"]["rope_theta"] == 10_000.0
    assert config["rope_parameters"]["full_attention"]["rope_theta"] == 1_000_000.0
    assert "Gemma Terms of Use" in (demo_snapshot / "NOTICE").read_text(encoding="utf-8")
    assert (demo_snapshot / "GEMMA_TERMS.html").stat().st_size > 100_000


def test_the_demo_weights_are_those_of_the_package(demo_snapshot: Path, tmp_path: Path) -> None:
    reader = demo._open(demo._assemble(tmp_path))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert len(tensors) == 236
    import safetensors

    with safetensors.safe_open(demo_snapshot / "model.safetensors", "numpy") as file:
        assert set(file.keys()) == {demo.hf_name(name) for name in tensors}
        for name, tensor in tensors.items():
            if ("norm" in name or ".5." in name or ".17." in name) and name != "token_embd.weight":
                stored = file.get_tensor(demo.hf_name(name))
                applied = np.float32(1) + stored if "norm" in name else stored
                assert np.array_equal(applied, gguf.dequantize(tensor.data, tensor.tensor_type)), name
        rows = file.get_slice("model.embed_tokens.weight")
        table = tensors["token_embd.weight"]
        for start in (0, 8190, 262_100):
            expected = gguf.dequantize(table.data[start : start + 40], table.tensor_type)
            assert np.array_equal(rows[start : start + 40], expected)


def test_importing_the_converter_loads_nothing_heavy() -> None:
    code = "import sys, spinf_serve.demo; print({'gguf', 'torch', 'safetensors', 'tokenizers'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == "set()"
