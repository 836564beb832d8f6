"""A random checkpoint of a published model's exact shape, so that speed and invariance need no download.

    python -m benchmarks.random_checkpoint --model gemma-4-12b --format fp8-static --tokenizer DIR --out DIR
        [--layers 8] [--text] [--seed 0] [--device cuda]

Drawn on the GPU where there is one, and written block by block: 12B in static fp8 (12.6 GB) never lies whole in host
memory. --layers keeps the pattern of layer types, the last layer is full. --tokenizer is a folder with tokenizer.json
and tokenizer_config.json, also compressed (.gz, .xz). --text writes the text model by itself (for transformers, which
asks the published form for its media parts).

The weights have eyes: linears N(0, 1/√fan_in), norms N(1, 0.3), `layer_scalar` U(0.5, 1.5), the final norm times 6, so
that the logits of the tied head reach about ±20. The norms on q and k are smaller by a fixed factor: scores are not
scaled, and with the factor they have a standard deviation of about 3, neither flat nor one-hot.
"""

import argparse
import gzip
import json
import lzma
import math
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.shapes import FULL, MODELS, TEXT_TYPES, Json, cut_layers
from workers.engine.quant import compressed_tensors, fp8
from workers.engine.quant.rounding import E4M3_MAX, scale_for
from workers.engine.shard_writer import Entry, ShardWriter
from workers.engine.shards import INDEX

LAYERS_PER_SHARD = 4
LOGIT_STD = 6.0  # of a logit before the soft-cap: the largest of 262,144 reach ±20 after it
SCORE_STD = 3.0
INPUT_AMAX = {"o_proj": 8.0, "down_proj": 28.0}
"""Largest inputs of linears to expect over some thousand rows: weighted means of normalised values, and products of two
normal values (the tail of the larger kind is exp(-x)). Every other linear reads a norm's output."""
NORM_AMAX = 12.0
_BLOCK = 64 << 20  # values drawn at a time
_WRITERS = 4

Draw = Callable[[tuple[int, ...], torch.Generator], Tensor]


def linears(text: Json, layer: int) -> dict[str, tuple[int, int]]:
    """Name below the layer → (O, K)."""
    hidden, inner, heads = text["hidden_size"], text["intermediate_size"], text["num_attention_heads"]
    full = text["layer_types"][layer] == FULL
    head = text["global_head_dim"] if full else text["head_dim"]
    key = head * (text["num_global_key_value_heads"] if full else text["num_key_value_heads"])
    values = {} if full and text["attention_k_eq_v"] else {"self_attn.v_proj": (key, hidden)}
    return {
        "self_attn.q_proj": (heads * head, hidden),
        "self_attn.k_proj": (key, hidden),
        **values,
        "self_attn.o_proj": (hidden, heads * head),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }


def norms(text: Json, layer: int) -> dict[str, tuple[int, float]]:
    """Name below the layer → (size, the factor of its values)."""
    head = text["global_head_dim"] if text["layer_types"][layer] == FULL else text["head_dim"]
    # q · k of two normalised heads has a standard deviation of √D times both factors
    factor = math.sqrt(SCORE_STD / math.sqrt(head))
    around = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    return {
        "self_attn.q_norm": (head, factor),
        "self_attn.k_norm": (head, factor),
        **{f"{name}_layernorm": (text["hidden_size"], 1.0) for name in around},
    }


class CheckpointWriter:
    """Writes the tensors of one checkpoint; every tensor's values depend on its name, the seed and the device alone."""

    def __init__(self, out: Path, text: Json, *, quantized: bool, prefix: str, seed: int, device: torch.device) -> None:
        self.out, self.text, self.quantized, self.prefix = out, text, quantized, prefix
        self.seed, self.device = seed, device

    def shards(self) -> list[range | None]:
        """The layers of each file; None: embedding and final norm."""
        count = self.text["num_hidden_layers"]
        return [None, *(range(i, min(i + LAYERS_PER_SHARD, count)) for i in range(0, count, LAYERS_PER_SHARD))]

    def write(self) -> int:
        """All files and the index; returns the bytes of the tensors."""
        shards = self.shards()
        names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
        with ThreadPoolExecutor(_WRITERS if self.device.type == "cuda" else 1) as pool:
            entries = list(pool.map(self._write_shard, names, shards))
        weight_map = {tensor: name for name, some in zip(names, entries, strict=True) for tensor in some}
        total = sum(entry.num_bytes for some in entries for entry in some.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (self.out / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
        return total

    def _write_shard(self, name: str, layers: range | None) -> dict[str, Entry]:
        entries = self._head_entries() if layers is None else {}
        for layer in layers or ():
            entries |= self._layer_entries(layer)
        with ShardWriter(self.out / name, entries, {"format": "pt"}) as writer:
            if layers is None:
                self._write_head(writer)
            for layer in layers or ():
                self._write_layer(writer, layer)
        return entries

    def _head_entries(self) -> dict[str, Entry]:
        hidden = self.text["hidden_size"]
        return {
            f"{self.prefix}embed_tokens.weight": Entry("BF16", (self.text["vocab_size"], hidden)),
            f"{self.prefix}norm.weight": Entry("BF16", (hidden,)),
        }

    def _layer_entries(self, layer: int) -> dict[str, Entry]:
        at = f"{self.prefix}layers.{layer}."
        entries = {f"{at}{name}.weight": Entry("BF16", (size,)) for name, (size, _) in norms(self.text, layer).items()}
        entries[f"{at}layer_scalar"] = Entry("BF16", (1,))
        for name, shape in linears(self.text, layer).items():
            if self.quantized:
                entries |= {stored: Entry(*kind) for stored, kind in fp8.layout(at + name, shape).items()}
            else:
                entries[f"{at}{name}.weight"] = Entry("BF16", shape)
        return entries

    def _write_head(self, writer: ShardWriter) -> None:
        vocabulary, hidden = self.text["vocab_size"], self.text["hidden_size"]
        name = f"{self.prefix}embed_tokens.weight"
        for block in self._normal(name, (vocabulary, hidden), 1 / math.sqrt(hidden)):
            writer.write(name, block.bfloat16().cpu())
        self._write_norm(writer, f"{self.prefix}norm.weight", hidden, LOGIT_STD)

    def _write_layer(self, writer: ShardWriter, layer: int) -> None:
        at = f"{self.prefix}layers.{layer}."
        for name, (size, factor) in norms(self.text, layer).items():
            self._write_norm(writer, f"{at}{name}.weight", size, factor)
        scalar = 0.5 + torch.rand(1, generator=self._generator(f"{at}layer_scalar"), device=self.device)
        writer.write(f"{at}layer_scalar", scalar.bfloat16().cpu())
        for name, (rows, columns) in linears(self.text, layer).items():
            blocks = list(self._normal(f"{at}{name}.weight", (rows, columns), 1 / math.sqrt(columns)))
            if self.quantized:
                self._write_codes(writer, at + name, blocks)
                continue
            for block in blocks:
                writer.write(f"{at}{name}.weight", block.bfloat16().cpu())

    def _write_codes(self, writer: ShardWriter, linear: str, blocks: list[Tensor]) -> None:
        scale = scale_for(torch.stack([block.abs().amax() for block in blocks]).amax(), E4M3_MAX)
        amax = INPUT_AMAX.get(linear.rpartition(".")[2], NORM_AMAX)
        writer.write(linear + fp8.WEIGHT_SCALE, scale.float().reshape(1).cpu())
        writer.write(linear + fp8.INPUT_SCALE, torch.tensor([fp8.input_scale(amax)]))
        for block in blocks:
            writer.write(linear + fp8.WEIGHT, fp8.quantize(block, scale).cpu())

    def _write_norm(self, writer: ShardWriter, name: str, size: int, factor: float) -> None:
        noise = torch.randn(size, generator=self._generator(name), device=self.device)
        writer.write(name, (factor * (1 + 0.3 * noise)).bfloat16().cpu())

    def _normal(self, name: str, shape: tuple[int, int], std: float) -> Iterator[Tensor]:
        """Rows of N(0, std), float32 on the device, a block at a time."""
        generator = self._generator(name)
        step = max(1, _BLOCK // shape[1])
        for first in range(0, shape[0], step):
            rows = min(step, shape[0] - first)
            yield torch.randn(rows, shape[1], generator=generator, device=self.device).mul_(std)

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(self.seed << 32 | zlib.crc32(name.encode()))


def config_json(model_type: str, text: Json, *, quantized: bool, text_only: bool) -> Json:
    """config.json: the published multimodal form without its media parts, or the text model's own."""
    text = {"model_type": TEXT_TYPES[model_type], **text}
    if text_only:
        architecture = {"gemma4": "Gemma4ForCausalLM", "gemma4_unified": "Gemma4UnifiedForCausalLM"}[model_type]
        config: Json = {"architectures": [architecture], **text}
    else:
        architecture = {"gemma4": "Gemma4", "gemma4_unified": "Gemma4Unified"}[model_type]
        config = {
            "architectures": [f"{architecture}ForConditionalGeneration"],
            "model_type": model_type,
            "dtype": "bfloat16",
            "text_config": text,
            "tie_word_embeddings": True,
        }
    return config | ({"quantization_config": compressed_tensors.to_json(["lm_head"])} if quantized else {})


def copy_tokenizer(source: Path, target: Path) -> None:
    """tokenizer.json and, where there is one, tokenizer_config.json; each as it is or compressed."""
    openers: dict[str, Callable[[Path], Any]] = {"": lambda path: path.open("rb"), ".gz": gzip.open, ".xz": lzma.open}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        found = next((ending for ending in openers if (source / f"{name}{ending}").is_file()), None)
        if found is None:
            if name == "tokenizer.json":
                raise SystemExit(f"{source} has no {name}, nor {name}.gz or .xz")
            continue
        with openers[found](source / f"{name}{found}") as packed, (target / name).open("wb") as file:
            shutil.copyfileobj(packed, file)


def write_checkpoint(
    out: Path,
    model_type: str,
    text: Json,
    *,
    quantized: bool,
    tokenizer: Path | None = None,
    text_only: bool = False,
    seed: int = 0,
    device: str = "cpu",
) -> int:
    """Write a snapshot into `out`, which must not exist; config.json comes last. Returns the bytes of the tensors."""
    out.mkdir(parents=True)
    if tokenizer is not None:
        copy_tokenizer(tokenizer, out)
    prefix = "model." if text_only else "model.language_model."
    writer = CheckpointWriter(out, text, quantized=quantized, prefix=prefix, seed=seed, device=torch.device(device))
    total = writer.write()
    config = config_json(model_type, text, quantized=quantized, text_only=text_only)
    (out / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return total


def main() -> None:
    """Write and say how much in which time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--format", choices=("fp8-static", "bf16"), default="fp8-static")
    parser.add_argument("--layers", type=int, default=None, help="default: all")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, default=None)
    parser.add_argument("--text", action="store_true", help="the text model by itself")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    shape = MODELS[args.model]
    text = cut_layers(shape.text, args.layers or shape.text["num_hidden_layers"])
    started = time.perf_counter()
    total = write_checkpoint(
        args.out, shape.model_type, text, quantized=args.format == "fp8-static", tokenizer=args.tokenizer,
        text_only=args.text, seed=args.seed, device=args.device,
    )  # fmt: skip
    seconds = time.perf_counter() - started
    print(
        f"{args.model}, {text['num_hidden_layers']} layers, {args.format}: {total / 1e9:.2f} GB in {args.out}, "
        f"{seconds:.1f} s"
    )


if __name__ == "__main__":
    main()
