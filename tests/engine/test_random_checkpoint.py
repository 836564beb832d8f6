"""`benchmarks.random_checkpoint`: the shapes are the published ones, our loader reads it, scores are finite."""

import gzip
import json
import lzma
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.random_checkpoint import INPUT_AMAX, NORM_AMAX, copy_tokenizer, linears, norms, write_checkpoint
from benchmarks.shapes import FULL, MODELS, SLIDING, Json, cut_layers
from spinf_serve import Engine
from tests.support.tiny import write_tiny_tokenizer
from workers.engine.models import GemmaModel, model_config
from workers.engine.quant.fp8 import input_scale
from workers.engine.shards import Snapshot
from workers.engine.weights import load_weights, weight_places

TINY = {
    "hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "global_head_dim": 32, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_global_key_value_heads": 1, "sliding_window": 16,
}  # fmt: skip


def tiny_text(model: str, layers: int, vocab_size: int) -> Json:
    return cut_layers(MODELS[model].text | TINY | {"vocab_size": vocab_size}, layers)


def weights_in_linears(text: Json) -> int:
    shapes = [shape for layer in range(text["num_hidden_layers"]) for shape in linears(text, layer).values()]
    return sum(rows * columns for rows, columns in shapes)


def test_the_12b_has_328_linears_with_10_9_g_weights() -> None:
    text = MODELS["gemma-4-12b"].text
    assert sum(len(linears(text, layer)) for layer in range(48)) == 328
    assert round(weights_in_linears(text) / 1e9, 1) == 10.9


def test_the_31b_has_30_7_g_weights() -> None:
    text = MODELS["gemma-4-31b"].text
    assert round((weights_in_linears(text) + text["vocab_size"] * text["hidden_size"]) / 1e9, 1) == 30.7


def test_fewer_layers_keep_the_pattern_and_end_full() -> None:
    text = cut_layers(MODELS["gemma-4-12b"].text, 8)
    assert text["layer_types"] == [SLIDING] * 5 + [FULL, SLIDING, FULL]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("text_only", [False, True])
@pytest.mark.parametrize("quantized", [False, True])
def test_every_weight_has_its_place_in_our_model(tmp_path: Path, model: str, text_only: bool, quantized: bool) -> None:
    text = tiny_text(model, 7, 50)
    write_checkpoint(tmp_path / "c", MODELS[model].model_type, text, quantized=quantized, text_only=text_only)
    ours = GemmaModel(model_config(tmp_path / "c"))
    load_weights(ours, tmp_path / "c")
    assert all(torch.isfinite(parameter).all() for parameter in ours.parameters())
    with Snapshot(tmp_path / "c") as snapshot:
        assert len(snapshot.shards) == 3
        kinds = Counter(tensor.dtype for tensor in snapshot.tensors.values())
    linear = sum(len(linears(text, layer)) for layer in range(7))
    norm = sum(len(norms(text, layer)) + 1 for layer in range(7)) + 2
    assert kinds == ({"F8_E4M3": linear, "F32": 2 * linear, "BF16": norm} if quantized else {"BF16": linear + norm})
    assert len(weight_places(ours)) == linear + norm


@pytest.mark.parametrize("model", ["gemma-4-12b", "gemma-4-31b"])
def test_a_checkpoint_is_served_from_its_directory_with_finite_scores(tmp_path: Path, model: str) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    size = write_tiny_tokenizer(tokenizer)
    out = tmp_path / "c"
    write_checkpoint(out, MODELS[model].model_type, tiny_text(model, 12, size), quantized=True, tokenizer=tokenizer)
    body = {
        "inputs": [{"id": "a", "messages": [{"content": "the dog and the cat are here"}]}],
        "scoring": {"queries": [{"id": "q", "template": "\nIs it good?{?}", "options": [" yes", " no"]}]},
    }
    with Engine(str(out), device="cpu") as engine:
        options = engine.score(body)["results"][0]["queries"][0]["combinations"][0]["options"]
        again = engine.score(body)["results"][0]["queries"][0]["combinations"][0]["options"]
    assert options == again
    assert all(np.isfinite(option["logprob"]) and option["logprob"] < -0.01 for option in options)


def test_the_stream_stays_finite_and_the_inputs_within_their_scales_through_48_layers(tmp_path: Path) -> None:
    """Statistics do not depend on the width, so a narrow model of the same depth shows them."""
    text = cut_layers(MODELS["gemma-4-12b"].text | TINY | {"vocab_size": 4000, "hidden_size": 256}, 48)
    write_checkpoint(tmp_path / "c", "gemma4_unified", text, quantized=False, text_only=True)
    model = GemmaModel(model_config(tmp_path / "c"))
    load_weights(model, tmp_path / "c")
    largest: dict[str, float] = {}
    logits, streams = run_rows(model, largest, rows=192)
    assert all(0.05 < float(x.pow(2).mean().sqrt()) < 100 for x in streams)
    assert 12 < float(logits.abs().amax()) < 30
    for name, amax in largest.items():
        limit = INPUT_AMAX.get(name, NORM_AMAX)
        assert limit / 6 < amax < 448 * input_scale(limit), name


def run_rows(model: GemmaModel, largest: dict[str, float], rows: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One plain content through the model: capped logits of its last row, and the stream after each layer."""
    from spinf_serve.plan import ScorePlan
    from workers.engine.kernels.products import RowRule
    from workers.engine.layers.linear import Linear
    from workers.engine.models.gemma import GemmaLayer
    from workers.engine.packing import PlanCursor, Share, build_pass
    from workers.engine.runner import Runner

    streams: list[torch.Tensor] = []
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            kind = name.rpartition(".")[2]

            def seen(_module: torch.nn.Module, args: tuple[torch.Tensor, ...], kind: str = kind) -> None:
                largest[kind] = max(largest.get(kind, 0.0), float(args[0].abs().amax()))

            module.register_forward_pre_hook(seen)
        if isinstance(module, GemmaLayer):
            module.register_forward_hook(lambda _module, _args, out: streams.append(out[0].clone()))
    vocabulary = model.config.vocab_size
    tokens = np.random.default_rng(0).integers(0, vocabulary, rows).astype(np.int32)
    plan = ScorePlan(
        tokens=tokens,
        parents=np.arange(-1, rows - 1, dtype=np.int32),
        job_offsets=np.array([0, rows]),
        prefix_lens=np.array([rows], np.int32),
        read_rows=np.array([rows - 1], np.int32),
        col_offsets=np.array([0, vocabulary]),
        cols=np.arange(vocabulary, dtype=np.int32),
    )
    piece = PlanCursor(plan, rows, rows).take(rows)
    assert piece is not None
    runner = Runner(model, RowRule())
    logprobs = torch.from_numpy(runner.run(runner.stage(build_pass([Share("a", plan, piece)]))))
    cap = 30 * torch.tanh((model.model.norm(streams[-1][:1]) @ model.head_weight.float().t())[0] / 30)
    assert torch.allclose(torch.log_softmax(cap, 0), logprobs, atol=1e-3)
    return cap, streams


@pytest.mark.parametrize("ending", ["", ".gz", ".xz"])
def test_a_tokenizer_may_travel_compressed(tmp_path: Path, ending: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    text = json.dumps({"a": 1}).encode()
    packed = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}[ending](text)
    (source / f"tokenizer.json{ending}").write_bytes(packed)
    copy_tokenizer(source, tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == text


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"has no tokenizer\.json"):
        copy_tokenizer(tmp_path, tmp_path)
