"""`spinf-serve calibrate` and `spinf-serve quantize`, as people type them."""

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from spinf_serve import Engine
from spinf_serve.cli import app
from tests.engine.quant.support import bf16_checkpoint, change, exported, write_calibration
from workers.engine.calibrate import calibrate
from workers.engine.export import weights_digest
from workers.engine.quant import fp8
from workers.preprocess.tokenizer import ContentTokenizer

BODY = {
    "messages": [{"content": "Where is my order?"}],
    "scoring": {"queries": [{"id": "q", "template": "\nRefund?{?}", "options": [" yes", " no"]}]},
}
TEXTS = ("I was charged twice for September, please refund one of the charges. " * 3, "Where is my order?")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("SPINF_"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bf16_checkpoint(tmp_path_factory.mktemp("commands") / "tiny")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def invoke(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refused(*arguments: str | Path) -> str:
    result = invoke(*arguments)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert isinstance(result.exception, SystemExit), result.exception
    return str(result.stderr)


def test_from_a_corpus_to_a_served_checkpoint(source: Path, corpus: Path, tmp_path: Path) -> None:
    out, target = tmp_path / "calibration.json", tmp_path / "static"
    result = invoke("calibrate", source, "--corpus", corpus, "--out", out, "--window", 32)
    assert result.exit_code == 0, result.output
    assert "100 %" in result.stderr
    content = json.loads(out.read_text())
    tokenizer = ContentTokenizer.load(source)
    windows = []
    for text in TEXTS:
        ids = tokenizer.encode(text)
        windows += [[tokenizer.bos_id, *ids[i : i + 31]] for i in range(0, len(ids), 31)]
    counts = {"texts": 2, "windows": len(windows), "tokens": sum(map(len, windows)), "window": 32}
    assert len(windows) > 2
    assert content["corpus"].items() >= counts.items()
    assert content["corpus"]["files"][0]["sha256"] == hashlib.sha256(corpus.read_bytes()).hexdigest()
    assert content["model"]["weights"] == content["model"]["revision"] == weights_digest(source)
    expected = calibrate(source, windows)
    assert {name: entry["amax"] for name, entry in content["linears"].items()} == expected
    assert all(entry["input_scale"] == fp8.input_scale(entry["amax"]) for entry in content["linears"].values())

    result = invoke("quantize", source, target, "--calibration", out)
    assert result.exit_code == 0, result.output
    body = {
        "messages": [{"role": "user", "content": TEXTS[0]}],
        "scoring": {"queries": [{"id": "q", "template": "\nRefund?{?}", "options": [" yes", " no"]}]},
    }
    with Engine(str(target), device="cpu", warmup="none") as engine:
        options = engine.score(body)["results"][0]["queries"][0]["combinations"][0]["options"]
    assert sum(option["p"] for option in options) == pytest.approx(1, abs=1e-5)


def test_a_bad_scale_refuses_the_start_by_name(source: Path, tmp_path: Path) -> None:
    """As for everything that no retry cures: the command says which tensor and exits with 1."""
    snapshot, _ = exported(source, tmp_path / "static")
    name = "model.layers.2.self_attn.o_proj.input_scale"
    change(snapshot, {name: torch.tensor([0.0])})
    request = tmp_path / "request.json"
    request.write_text(json.dumps(BODY))
    assert f"{name} is 0.0" in refused("score", request, snapshot, "--device", "cpu")


def test_a_second_calibration_has_the_same_bytes(source: Path, corpus: Path, tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        assert invoke("calibrate", source, "--corpus", corpus, "--out", tmp_path / name).exit_code == 0
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_an_existing_file_is_not_replaced(source: Path, corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine.json"
    out.write_text("mine")
    assert "exists already" in refused("calibrate", source, "--corpus", corpus, "--out", out)
    assert out.read_text() == "mine"


def test_a_file_that_appears_meanwhile_is_not_replaced(
    source: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out" / "mine.json"
    out.parent.mkdir()
    module = sys.modules["spinf_serve.cli.calibrate"]
    monkeypatch.setattr(module, "_calibrate", lambda *_: out.write_text("mine") and "ours")
    assert "cannot be written" in refused("calibrate", source, "--corpus", corpus, "--out", out)
    assert [(path.name, path.read_text()) for path in out.parent.iterdir()] == [("mine.json", "mine")]


def test_a_quantized_checkpoint_is_not_calibrated(source: Path, corpus: Path, tmp_path: Path) -> None:
    """Its calibration would belong to weights that quantize refuses."""
    static, _ = exported(source, tmp_path / "static")
    message = refused("calibrate", static, "--corpus", corpus, "--out", tmp_path / "c.json")
    assert "is quantized already" in message
    assert not (tmp_path / "c.json").exists()


def test_calibrate_tells_what_takes_time(source: Path, tmp_path: Path) -> None:
    """A corpus file may have a name that is no text."""
    corpus = tmp_path / os.fsdecode(b"corpus-\xff.txt")
    corpus.write_text("Where is my order?")
    result = invoke("calibrate", source, "--corpus", corpus, "--out", tmp_path / "c.json")
    assert result.exit_code == 0, result.output
    assert f"hashing the weights in {source}" in result.stderr
    assert "loading weights: 100 %" in result.stderr
    assert json.loads((tmp_path / "c.json").read_text())["corpus"]["files"][0]["name"] == "corpus-?.txt"


def test_a_corpus_without_a_token_is_refused(
    source: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ContentTokenizer, "encode", lambda *_: [])
    assert "no text" in refused("calibrate", source, "--corpus", corpus, "--out", tmp_path / "c.json")


def test_calibrate_says_what_is_wrong(source: Path, corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "c.json"
    absent = tmp_path / "absent.jsonl"
    assert "absent.jsonl: cannot be read" in refused("calibrate", source, "--corpus", absent, "--out", out)
    assert "unknown model" in refused("calibrate", "no-such-model", "--corpus", corpus, "--out", out)
    assert "neither a string" in refused("calibrate", source, "--corpus", corpus, "--out", out, "--field", "body")
    nowhere = tmp_path / "no" / "folder" / "c.json"
    assert "not a directory" in refused("calibrate", source, "--corpus", corpus, "--out", nowhere)
    assert not out.exists()
    assert invoke("calibrate", source, "--out", out).exit_code == 2
    assert invoke("calibrate", source, "--corpus", corpus).exit_code == 2
    assert invoke("calibrate", source, "--corpus", corpus, "--out", out, "--window", "1").exit_code == 2


def test_quantize_says_what_is_wrong(source: Path, tmp_path: Path) -> None:
    calibration, target = write_calibration(source, tmp_path / "c.json"), tmp_path / "target"
    assert "is not a calibration" in refused("quantize", source, target, "--calibration", source / "config.json")
    absent = refused("quantize", source, target, "--calibration", tmp_path / "absent.json")
    assert "absent.json cannot be read: No such file" in absent
    assert "unknown model" in refused("quantize", tmp_path / "absent", target, "--calibration", calibration)
    target.mkdir()
    assert "exists already" in refused("quantize", source, target, "--calibration", calibration)
    assert invoke("quantize", source, tmp_path / "t").exit_code == 2
    card = tmp_path / "absent.md"
    message = refused("quantize", source, tmp_path / "t", "--calibration", calibration, "--card", card)
    assert "absent.md" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.json", "target"]
