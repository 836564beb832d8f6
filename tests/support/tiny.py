"""Tiny random Gemma 3 checkpoints with a real small tokenizer, written without torch in well under a second.

The weights have eyes, so that a fault in the forward shows: linears N(0, 1/√fan_in), norms stored as w of 1 + w with
w ~ N(0, 0.3), and a final norm scaled so that the logits of the tied head reach about ±20. Everything is drawn from
`seed`: the same call writes the same bytes.
"""

import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from spinf_serve.bpe import tokenizer_json
from tests.support.words import CHARACTERS, EXTRA_PIECES, WORDS

SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>")
MARKUP = ("table", "tr", "td", "h1", "b", "i", "code", "html", "ul", "li", "div")
Array = np.ndarray[Any, np.dtype[np.float32]]


def _train(words: tuple[str, ...]) -> list[str]:
    """Pieces of two or more characters, in the order of their making, until every word is one piece.

    Plain BPE training: the most frequent adjacent pair first, ties by the pair itself.
    """
    corpus = [list(word) for word in words]
    pieces: list[str] = []
    while True:
        counts: dict[tuple[str, str], int] = {}
        for symbols in corpus:
            for pair in pairwise(symbols):
                counts[pair] = counts.get(pair, 0) + 1
        if not counts:
            return pieces
        left, right = min(counts, key=lambda pair: (-counts[pair], pair))
        if left + right not in pieces:
            pieces.append(left + right)
        corpus = [_merge(symbols, left, right) for symbols in corpus]


def _merge(symbols: list[str], left: str, right: str) -> list[str]:
    merged: list[str] = []
    for symbol in symbols:
        if merged and merged[-1] == left and symbol == right:
            merged[-1] = left + right
        else:
            merged.append(symbol)
    return merged


@cache
def tiny_pieces() -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """The vocabulary in the order of Gemma's: (pieces, those matched as special, those matched as plain text)."""
    head = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "[multimodal]", *(f"<unused{i}>" for i in range(8))]
    head += ["<start_of_turn>", "<end_of_turn>"]
    newlines = ["\n" * n for n in range(1, 9)]
    spaces = ["▁" * n for n in range(2, 9)]
    tags = [f"<{name}>" for name in MARKUP] + [f"</{name}>" for name in MARKUP]
    tabs = ["\t" * n for n in range(1, 5)]
    tail = ["<start_of_image>", "<end_of_image>", "<unused8>", "<unused9>"]
    trained = _train(WORDS)
    pieces = head + newlines + spaces + tags + [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += [piece for piece in trained + list(EXTRA_PIECES) if piece not in pieces]
    pieces += [char for char in CHARACTERS if char not in pieces] + tabs + tail
    plain = [piece for piece in head + newlines + spaces + tags + tabs + tail if piece not in SPECIAL]
    return tuple(dict.fromkeys(pieces)), SPECIAL, tuple(plain)


def write_tiny_tokenizer(directory: Path) -> int:
    """Write tokenizer.json and tokenizer_config.json; returns the number of pieces."""
    pieces, special, plain = tiny_pieces()
    content = tokenizer_json(pieces, special=special, plain=plain)
    (directory / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    config = {
        "add_bos_token": True,
        "boi_token": "<start_of_image>",
        "bos_token": "<bos>",
        "eoi_token": "<end_of_image>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return len(pieces)


def tiny_config(vocab_size: int, **overrides: Any) -> dict[str, Any]:
    """config.json of a small Gemma 3 text model in the spelling of transformers 5; `overrides` replace or add keys."""
    config: dict[str, Any] = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "dtype": "float32",
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "query_pre_attn_scalar": 16,
        "sliding_window": 16,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
        "attention_bias": False,
        "attention_dropout": 0.0,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "use_bidirectional_attention": False,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    }
    config |= overrides
    config.setdefault(
        "layer_types",
        ["full_attention" if (i + 1) % 3 == 0 else "sliding_attention" for i in range(config["num_hidden_layers"])],
    )
    return config


def tiny_weights(config: dict[str, Any], seed: int, logit_scale: float) -> dict[str, Array]:
    """The weights by their HF names, float32. `logit_scale` is the standard deviation of a logit: 6 reaches ±20."""
    rng = np.random.default_rng(seed)
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * head, config["num_key_value_heads"] * head

    def linear(rows: int, columns: int) -> Array:
        return rng.standard_normal((rows, columns), np.float32) / np.float32(np.sqrt(columns))

    def norm(size: int) -> Array:
        return rng.standard_normal(size, np.float32) * np.float32(0.3)

    weights = {"model.embed_tokens.weight": linear(config["vocab_size"], hidden)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for name, rows, columns in (
            ("self_attn.q_proj", query, hidden),
            ("self_attn.k_proj", key, hidden),
            ("self_attn.v_proj", key, hidden),
            ("self_attn.o_proj", hidden, query),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            weights[f"{layer}.{name}.weight"] = linear(rows, columns)
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            weights[f"{layer}.{name}.weight"] = norm(head)
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            weights[f"{layer}.{name}_layernorm.weight"] = norm(hidden)
    weights["model.norm.weight"] = (logit_scale * (1.0 + norm(hidden)) - 1.0).astype(np.float32)
    return weights


def write_weights(directory: Path, weights: dict[str, Array], shards: int) -> None:
    """One model.safetensors, or `shards` files with model.safetensors.index.json."""
    if shards == 1:
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(weights)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard::shards]
        save_file({name: weights[name] for name in part}, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    size = sum(array.nbytes for array in weights.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def make_tiny_checkpoint(
    directory: Path,
    *,
    seed: int = 0,
    layers: int = 3,
    heads: int = 4,
    kv_heads: int = 2,
    window: int = 16,
    shards: int = 1,
    logit_scale: float = 6.0,
    **overrides: Any,
) -> Path:
    """Write a random checkpoint (config, tokenizer, safetensors) into `directory` and return it.

    `overrides` are keys of config.json: `final_logit_softcapping=8.0`, `attn_logit_softcapping=2.0`, `head_dim=32`,
    `query_pre_attn_scalar=8`, `layer_types=[...]`, `rope_parameters={...}`, `hidden_size=128`, ... `layers` is the
    number of layers, every third one full; `window` the sliding window in tokens.
    """
    directory.mkdir(parents=True, exist_ok=True)
    vocab_size = write_tiny_tokenizer(directory)
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "sliding_window": window}
    config = tiny_config(vocab_size, num_hidden_layers=layers, **sizes, **overrides)
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    write_weights(directory, tiny_weights(config, seed, logit_scale), shards)
    return directory
