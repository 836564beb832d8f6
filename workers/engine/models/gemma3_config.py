"""config.json of Gemma 3. Absent keys take the defaults of transformers' `Gemma3TextConfig`."""

import logging

from workers.engine.models.config import Json, RotarySettings, integer, number, optional_number, require
from workers.engine.models.gemma_config import (
    FULL,
    MOST_LAYERS,
    SLIDING,
    GemmaConfig,
    head_layout,
    is_tied,
    listed_layer_types,
    rope_parameters,
    settings_of,
    text_config,
    window_size,
)

log = logging.getLogger(__name__)

TEXT_TYPES = ("gemma3_text",)
MODEL_TYPES = (*TEXT_TYPES, "gemma3")


def gemma3_config(config: Json) -> GemmaConfig:
    """From a whole config.json: of the text model, or of the multimodal one around it."""
    text = text_config(config, TEXT_TYPES)
    require(text, "hidden_activation", "gelu_pytorch_tanh", ("gelu_pytorch_tanh",))
    require(text, "attention_bias", False, (False,))
    require(text, "use_bidirectional_attention", False, (False, None))
    if text.get("attn_logit_softcapping") is not None:
        log.warning("config.json: attn_logit_softcapping is ignored for gemma3, as the reference implementation does")
    layer_types = _layer_types(text)
    heads = integer(text, "num_attention_heads", 8)
    layout = head_layout(heads, integer(text, "num_key_value_heads", 4), integer(text, "head_dim", 256))
    return GemmaConfig(
        vocab_size=integer(text, "vocab_size", 262_208),
        hidden_size=integer(text, "hidden_size", 2304),
        intermediate_size=integer(text, "intermediate_size", 9216),
        layouts=dict.fromkeys(layer_types, layout),
        scaling=number(text, "query_pre_attn_scalar", 256) ** -0.5,
        eps=number(text, "rms_norm_eps", 1e-6),
        layer_types=layer_types,
        sliding_window=window_size(text, layer_types, 4096),
        rotary=_rotary(text),
        final_softcap=optional_number(text, "final_logit_softcapping"),
        tied_head=is_tied(config, text),
        norm_offset=1.0,
        value_norm=False,
        layer_scalars=False,
    )


def _layer_types(text: Json) -> tuple[str, ...]:
    """`layer_types`, or every n-th layer full by `sliding_window_pattern` (6 where neither is given)."""
    count = integer(text, "num_hidden_layers", 26, largest=MOST_LAYERS)
    if text.get("layer_types") is not None:
        return listed_layer_types(text, count)
    key = "_sliding_window_pattern" if "_sliding_window_pattern" in text else "sliding_window_pattern"
    pattern = integer(text, key, 6)
    return tuple(SLIDING if (i + 1) % pattern else FULL for i in range(count))


def _rotary(text: Json) -> dict[str, RotarySettings]:
    """Both spellings: `rope_parameters` per layer type, or `rope_theta`, `rope_local_base_freq` and `rope_scaling`."""
    given = rope_parameters(text)
    full = settings_of(given, FULL) | settings_of(text, "rope_scaling")
    return {
        FULL: RotarySettings.from_json(FULL, full, number(text, "rope_theta", 1_000_000.0)),
        SLIDING: RotarySettings.from_json(
            SLIDING, settings_of(given, SLIDING), number(text, "rope_local_base_freq", 10_000.0)
        ),
    }
