"""config.json of Gemma 4, `gemma4` and `gemma4_unified`, in both spellings of what full layers have of their own.

Absent keys take the defaults of transformers' `Gemma4TextConfig` and `Gemma4UnifiedTextConfig`. What this engine does
not compute is refused here, before a weight is read.
"""

import logging
import re
from typing import Any

from workers.engine.errors import LoadError
from workers.engine.kernels.rotary import HeadLayout
from workers.engine.models.config import Json, RotarySettings, boolean, integer, number, optional_number, require
from workers.engine.models.gemma_config import (
    FULL,
    MOST_LAYERS,
    SLIDING,
    GemmaConfig,
    head_layout,
    is_tied,
    listed_layer_types,
    rope_parameters,
    text_config,
    window_size,
)

log = logging.getLogger(__name__)

TEXT_TYPES = {"gemma4": ("gemma4_text",), "gemma4_unified": ("gemma4_unified_text",)}
MODEL_TYPES = ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")

_PATTERN = 6  # without `layer_types` every 6th layer is full
_ROPE_KINDS = ("default", "linear", "proportional")
_DEFAULT_ROPE: Json = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
}


def gemma4_config(config: Json) -> GemmaConfig:
    """From a whole config.json: of the text model, or of the multimodal one around it."""
    unified = config["model_type"].startswith("gemma4_unified")
    text = text_config(config, TEXT_TYPES["gemma4_unified" if unified else "gemma4"])
    _refuse_variants(text, unified)
    require(text, "hidden_activation", "gelu_pytorch_tanh", ("gelu_pytorch_tanh",))
    require(text, "attention_bias", False, (False,))
    layer_types = _layer_types(text)
    return GemmaConfig(
        vocab_size=integer(text, "vocab_size", 262_144),
        hidden_size=integer(text, "hidden_size", 2304),
        intermediate_size=integer(text, "intermediate_size", 9216),
        layouts=_layouts(text, layer_types),
        scaling=1.0,
        eps=number(text, "rms_norm_eps", 1e-6),
        layer_types=layer_types,
        sliding_window=window_size(text, layer_types, 1024 if unified else 512),
        rotary=_rotary(text, layer_types),
        final_softcap=optional_number(text, "final_logit_softcapping"),
        tied_head=is_tied(config, text),
        norm_offset=0.0,
        value_norm=True,
        layer_scalars=True,
    )


def _refuse_variants(text: Json, unified: bool) -> None:
    """E2B, E4B and the mixture-of-experts models have parts that this engine does not compute."""
    refused = {
        "hidden_size_per_layer_input": (0 if unified else 256, "per-layer input embeddings (as E2B and E4B have them)"),
        "num_kv_shared_layers": (0, "layers that share keys and values (as in E2B and E4B)"),
        "enable_moe_block": (False, "mixture-of-experts layers"),
    }
    for key, (default, what) in refused.items():
        value = text.get(key, default)
        if value not in (0, None):  # false is 0
            raise LoadError(f"config.json: {key} {value!r}: models with {what} are not supported")
    # "vision" concerns media tokens alone: text stays causal
    require(text, "use_bidirectional_attention", None, (None, False, "vision"))


def _layer_types(text: Json) -> tuple[str, ...]:
    """The last layer is full whatever is listed, as in the reference."""
    count = integer(text, "num_hidden_layers", 30, largest=MOST_LAYERS)
    if text.get("layer_types") is None:
        types = tuple(SLIDING if (i + 1) % _PATTERN else FULL for i in range(count))
    else:
        types = listed_layer_types(text, count)
    if types[-1] != FULL:
        log.warning("config.json: the last layer is taken for %s, as the reference implementation does", FULL)
    return (*types[:-1], FULL)


def _layouts(text: Json, layer_types: tuple[str, ...]) -> dict[str, HeadLayout]:
    """The heads of each layer type. On full layers with `attention_k_eq_v` the value is the key's projection."""
    heads = integer(text, "num_attention_heads", 8)
    k_eq_v = boolean(text, "attention_k_eq_v", False)
    layouts: dict[str, HeadLayout] = {}
    for index, (kind, own) in enumerate(zip(layer_types, _own_settings(text, layer_types, k_eq_v), strict=True)):
        merged = {"head_dim": 256, "num_key_value_heads": 4} | text | own
        layout = head_layout(
            heads,
            integer(merged, "num_key_value_heads"),
            integer(merged, "head_dim"),
            shared_kv=k_eq_v and kind == FULL,
        )
        if layouts.setdefault(kind, layout) != layout:
            raise LoadError(f"config.json: layer {index} has other heads than the {kind} layers before it")
    return layouts


def _own_settings(text: Json, layer_types: tuple[str, ...], k_eq_v: bool) -> list[Json]:
    """What each layer has of its own: `per_layer_config`, or else the `global_*` keys for the full layers."""
    if "per_layer_config" in text:
        return _per_layer(text["per_layer_config"] or {}, len(layer_types))
    full = {"head_dim": integer(text, "global_head_dim", 512)}
    if k_eq_v and text.get("num_global_key_value_heads") is not None:
        full["num_key_value_heads"] = integer(text, "num_global_key_value_heads")
    return [full if kind == FULL else {} for kind in layer_types]


def _per_layer(given: Any, count: int) -> list[Json]:
    """`per_layer_config`: layer index, as text → its settings."""
    own: list[Json] = [{} for _ in range(count)]
    for key, settings in given.items() if isinstance(given, dict) else [("", given)]:
        where = f"config.json: per_layer_config.{key}"
        if not re.fullmatch("[0-9]{1,4}", key) or int(key) >= count or not isinstance(settings, dict):
            raise LoadError(f"{where} must be the settings of one of the {count} layers")
        if unknown := {name for name in settings if name not in ("head_dim", "num_key_value_heads")} - _empty(settings):
            raise LoadError(f"{where}: {', '.join(sorted(unknown))} is not supported for single layers")
        own[int(key)] = {name: value for name, value in settings.items() if value != []}
    return own


def _empty(settings: Json) -> set[str]:
    """An empty list of parts to skip says nothing."""
    return {"skip"} if settings.get("skip") == [] else set()


def _rotary(text: Json, layer_types: tuple[str, ...]) -> dict[str, RotarySettings]:
    """`rope_parameters` per layer type; there is no older spelling."""
    given = rope_parameters(text) if text.get("rope_parameters") is not None else _DEFAULT_ROPE
    settings: dict[str, RotarySettings] = {}
    for kind in dict.fromkeys(layer_types):
        if not isinstance(given.get(kind), dict):
            raise LoadError(f"config.json: rope_parameters lacks {kind}")
        settings[kind] = RotarySettings.from_json(kind, given[kind], None, _ROPE_KINDS)
    return settings
