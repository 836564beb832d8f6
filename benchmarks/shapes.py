"""The shapes of the published models: the text part of their config.json, in its own spelling.

12B: shared by the model's card and transformers' `Gemma4UnifiedTextConfig`; 40 sliding and 8 full layers hold 328
linears with 10.9 G weights. 31B: 30.7 G weights with the embedding, which fixes the 4 key/value heads of full layers.
"""

from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

SLIDING, FULL = "sliding_attention", "full_attention"
TEXT_TYPES = {"gemma4": "gemma4_text", "gemma4_unified": "gemma4_unified_text"}
_COMMON: Json = {
    "vocab_size": 262_144,
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "attention_bias": False,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-6,
    "sliding_window": 1024,
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        FULL: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
    },
    "final_logit_softcapping": 30.0,
    "num_kv_shared_layers": 0,
    "use_bidirectional_attention": "vision",
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}


@dataclass(frozen=True, slots=True)
class Shape:
    """model_type: of the whole model. text: its text part, all layers."""

    model_type: str
    text: Json


def layer_types(count: int) -> list[str]:
    """Five sliding layers to one full; the last layer is always full."""
    types = [SLIDING if (i + 1) % 6 else FULL for i in range(count)]
    return [*types[:-1], FULL]


def cut_layers(text: Json, count: int) -> Json:
    """The same model with its first `count` layers, the last of them full."""
    return text | {"num_hidden_layers": count, "layer_types": layer_types(count)}


MODELS = {
    "gemma-4-12b": Shape(
        "gemma4_unified",
        cut_layers(
            _COMMON
            | {
                "hidden_size": 3840,
                "intermediate_size": 15_360,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
                "num_global_key_value_heads": 1,
            },
            48,
        ),
    ),
    "gemma-4-31b": Shape(
        "gemma4",
        cut_layers(
            _COMMON
            | {
                "hidden_size": 5376,
                "intermediate_size": 21_504,
                "num_attention_heads": 32,
                "num_key_value_heads": 16,
                "num_global_key_value_heads": 4,
                "hidden_size_per_layer_input": 0,
                "enable_moe_block": False,
            },
            60,
        ),
    ),
}
