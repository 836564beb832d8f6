"""Tiny random Gemma 4 checkpoints in every shape that config.json and the tensor names come in, without torch.

Sliding and full layers take turns. Full layers have larger heads, fewer key/value heads, K = V and a rotary embedding
of which a quarter of the pairs turns. The weights have eyes (see `tests.support.tiny`); norms are stored as the whole
factor. Heads are small because scores are not scaled: with N(0, √D) scores a larger D makes the attention so sharp that
float32 itself, ours and the reference's alike, is off by more than 1e-4.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.tiny import Array, write_tiny_tokenizer, write_weights

SLIDING, FULL = "sliding_attention", "full_attention"

FORMS: dict[str, tuple[str, str]] = {
    "gemma4_text": ("gemma4_text", "model."),
    "gemma4_unified_text": ("gemma4_unified_text", "model."),
    "gemma4": ("gemma4_text", "model.language_model."),
    "gemma4_unified": ("gemma4_unified_text", "model.language_model."),
}
"""model_type → that of the text part, and what the text model's names begin with."""

MEDIA = {
    "gemma4": (
        "model.vision_tower.encoder.layers.0.mlp.up_proj.linear.weight",
        "model.embed_vision.embedding_projection.weight",
    ),
    "gemma4_unified": ("model.vision_embedder.patch_dense.weight", "model.embed_audio.embedding_projection.weight"),
}
"""Some tensors of the multimodal models that belong to no text model."""


def gemma4_text_config(model_type: str, vocab_size: int, **overrides: Any) -> dict[str, Any]:
    """The text part of config.json, in the spelling of published checkpoints (`global_*`)."""
    config: dict[str, Any] = {
        "model_type": model_type,
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "sliding_window": 16,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
        },
        "attention_bias": False,
        "final_logit_softcapping": 30.0,
        "num_kv_shared_layers": 0,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    }
    if model_type == "gemma4_text":
        config |= {"hidden_size_per_layer_input": 0, "enable_moe_block": False}
    config |= overrides
    turns = [(SLIDING, FULL)[i % 2] for i in range(config["num_hidden_layers"])]
    return {"layer_types": turns} | config


def _layer_types(text: dict[str, Any]) -> list[str]:
    """The types that the model has: every 6th layer full where none are listed, the last one always."""
    count = text["num_hidden_layers"]
    types = text["layer_types"] or [FULL if i % 6 == 5 else SLIDING for i in range(count)]
    return [*types[:-1], FULL]


def per_layer_spelling(text: dict[str, Any]) -> dict[str, Any]:
    """The same as transformers 5.17 saves it: what full layers have of their own, layer by layer."""
    own = {"head_dim": text["global_head_dim"]}
    if text["attention_k_eq_v"] and text["num_global_key_value_heads"] is not None:
        own["num_key_value_heads"] = text["num_global_key_value_heads"]
    kept = {key: value for key, value in text.items() if not key.startswith(("global_", "num_global_"))}
    full = [i for i, kind in enumerate(_layer_types(text)) if kind == FULL]
    return kept | {"per_layer_config": {str(i): dict(own) for i in full}}


def _heads(text: dict[str, Any], index: int) -> tuple[int, int, bool]:
    """(head_dim, key/value heads, whether v is the key's projection) of a layer."""
    if _layer_types(text)[index] == SLIDING:
        return text["head_dim"], text["num_key_value_heads"], False
    shared = text["attention_k_eq_v"]
    kv_heads = text["num_global_key_value_heads"] if shared else None
    return text["global_head_dim"], kv_heads or text["num_key_value_heads"], shared


def gemma4_weights(text: dict[str, Any], prefix: str, seed: int, logit_scale: float) -> dict[str, Array]:
    """The weights by their HF names, float32. `logit_scale`: standard deviation of a logit, the soft-cap aside."""
    rng = np.random.default_rng(seed)
    hidden, inner, heads = text["hidden_size"], text["intermediate_size"], text["num_attention_heads"]

    def linear(rows: int, columns: int) -> Array:
        return rng.standard_normal((rows, columns), np.float32) / np.float32(np.sqrt(columns))

    def norm(size: int) -> Array:
        return np.float32(1.0) + rng.standard_normal(size, np.float32) * np.float32(0.3)

    weights = {f"{prefix}embed_tokens.weight": linear(text["vocab_size"], hidden)}
    for i in range(text["num_hidden_layers"]):
        layer = f"{prefix}layers.{i}"
        head, kv_heads, shared = _heads(text, i)
        linears = [("self_attn.q_proj", heads * head, hidden), ("self_attn.k_proj", kv_heads * head, hidden)]
        linears += [] if shared else [("self_attn.v_proj", kv_heads * head, hidden)]
        linears += [("self_attn.o_proj", hidden, heads * head), ("mlp.gate_proj", inner, hidden)]
        linears += [("mlp.up_proj", inner, hidden), ("mlp.down_proj", hidden, inner)]
        weights |= {f"{layer}.{name}.weight": linear(rows, columns) for name, rows, columns in linears}
        weights |= {f"{layer}.self_attn.{name}_norm.weight": norm(head) for name in "qk"}
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            weights[f"{layer}.{name}_layernorm.weight"] = norm(hidden)
        weights[f"{layer}.layer_scalar"] = rng.uniform(0.5, 1.5, 1).astype(np.float32)
    weights[f"{prefix}norm.weight"] = (logit_scale * norm(hidden)).astype(np.float32)
    return weights


def make_tiny_gemma4(
    directory: Path,
    *,
    model_type: str = "gemma4_text",
    spelling: str = "global",
    seed: int = 0,
    shards: int = 1,
    logit_scale: float = 6.0,
    **overrides: Any,
) -> Path:
    """Write a random checkpoint into `directory` and return it.

    model_type  one of `FORMS`: a text model, or the multimodal one around it, then with some tensors of its media parts
    spelling    "global" (published checkpoints) or "per_layer" (as transformers 5.17 saves it)
    overrides   keys of the text config, in the "global" spelling
    The weights depend on the seed and the sizes alone.
    """
    directory.mkdir(parents=True, exist_ok=True)
    text_type, prefix = FORMS[model_type]
    text = gemma4_text_config(text_type, write_tiny_tokenizer(directory), **overrides)
    weights = gemma4_weights(text, prefix, seed, logit_scale)
    weights |= {name: np.ones((3, 5), np.float32) for name in MEDIA.get(model_type, ())}
    config = per_layer_spelling(text) if spelling == "per_layer" else text
    if model_type != text_type:
        config = {
            "architectures": [
                {"gemma4": "Gemma4", "gemma4_unified": "Gemma4Unified"}[model_type] + "ForConditionalGeneration"
            ],
            "model_type": model_type,
            "text_config": config,
            "tie_word_embeddings": True,
        }
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    write_weights(directory, weights, shards)
    return directory
