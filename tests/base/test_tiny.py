"""The tiny checkpoints that other tests stand on: deterministic, drawn as they say, with the words they promise."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.tiny import make_tiny_checkpoint, tiny_config, tiny_weights
from tests.support.words import WORDS

numpy_safetensors = pytest.importorskip("safetensors.numpy", reason="the extra `server` is not installed")


def test_the_same_call_writes_the_same_bytes(tiny_checkpoint: Path, tmp_path: Path) -> None:
    again = make_tiny_checkpoint(tmp_path / "again")
    assert {path.name for path in again.iterdir()} == {path.name for path in tiny_checkpoint.iterdir()}
    for path in again.iterdir():
        assert path.read_bytes() == (tiny_checkpoint / path.name).read_bytes()
    other = make_tiny_checkpoint(tmp_path / "other", seed=1)
    assert (other / "model.safetensors").read_bytes() != (again / "model.safetensors").read_bytes()


def test_shards_hold_the_same_weights(tiny_checkpoint: Path, tmp_path: Path) -> None:
    whole = numpy_safetensors.load_file(tiny_checkpoint / "model.safetensors")
    sharded = make_tiny_checkpoint(tmp_path, shards=3)
    index = json.loads((sharded / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert len(set(index["weight_map"].values())) == 3
    assert index["weight_map"].keys() == whole.keys()
    for name, file in index["weight_map"].items():
        assert np.array_equal(numpy_safetensors.load_file(sharded / file)[name], whole[name])


def test_weights_are_drawn_so_that_faults_show() -> None:
    weights = tiny_weights(tiny_config(809, num_hidden_layers=12), seed=3, logit_scale=6.0)
    norms = np.concatenate(
        [weight for name, weight in weights.items() if "norm" in name and name != "model.norm.weight"]
    )
    assert abs(norms.std() - 0.3) < 0.02
    assert abs(norms.mean()) < 0.02
    for name, weight in weights.items():
        if "proj" in name:
            assert abs(weight.std() * np.sqrt(weight.shape[1]) - 1) < 0.06, name
    assert abs((1 + weights["model.norm.weight"]).mean() - 6) < 1


def test_the_promised_words_are_one_token(tiny_checkpoint: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the extra `server` is not installed")
    tokenizer = tokenizers.Tokenizer.from_file(str(tiny_checkpoint / "tokenizer.json"))
    for word in WORDS:
        assert tokenizer.encode(word.replace("▁", " "), add_special_tokens=False).tokens == [word]
