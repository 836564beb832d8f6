"""What the Gemma forward needs of config.json, whichever family and spelling it comes from."""

from dataclasses import dataclass

from workers.engine.errors import LoadError
from workers.engine.kernels.rotary import HeadLayout
from workers.engine.models.config import Json, RotarySettings, boolean, integer

SLIDING, FULL = "sliding_attention", "full_attention"
MOST_LAYERS = 1000
_LARGEST_WINDOW = 2**31 - 1


@dataclass(frozen=True, slots=True)
class GemmaConfig:
    """Facts of one model. Made by `gemma3_config` or `gemma4_config`.

    layouts        the heads of each layer type in use
    scaling        what scores are multiplied by
    rotary         the rotary settings of each layer type in use
    norm_offset    norms are stored as w of (offset + w)
    value_norm     v is normalised over each head, without a weight
    layer_scalars  every layer has a number that its output is multiplied by
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layouts: dict[str, HeadLayout]
    scaling: float
    eps: float
    layer_types: tuple[str, ...]
    sliding_window: int
    rotary: dict[str, RotarySettings]
    final_softcap: float | None
    tied_head: bool
    norm_offset: float
    value_norm: bool
    layer_scalars: bool

    def layout(self, index: int) -> HeadLayout:
        """The heads of a layer."""
        return self.layouts[self.layer_types[index]]

    def window(self, index: int) -> int | None:
        """The window of a layer, None where it is full."""
        return self.sliding_window if self.layer_types[index] == SLIDING else None


def text_config(config: Json, text_types: tuple[str, ...]) -> Json:
    """The text model's part: config.json itself for a text model, `text_config` for a multimodal one."""
    if config["model_type"] in text_types:
        return config
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise LoadError("config.json: text_config is missing")
    if text.get("model_type", text_types[0]) not in text_types:
        raise LoadError(
            f"config.json: text_config.model_type {text['model_type']!r} does not belong to {config['model_type']}"
        )
    return text


def is_tied(config: Json, text: Json) -> bool:
    """Whether the head is the embedding. A multimodal config's own word counts, not its text part's."""
    if text is not config and "tie_word_embeddings" not in config and not boolean(text, "tie_word_embeddings", True):
        raise LoadError("config.json: tie_word_embeddings of text_config differs from the whole model's, which is true")
    return boolean(config, "tie_word_embeddings", True)


def listed_layer_types(text: Json, count: int) -> tuple[str, ...]:
    """`layer_types`, checked."""
    types = text["layer_types"]
    if not isinstance(types, list) or len(types) != count or any(kind not in (SLIDING, FULL) for kind in types):
        raise LoadError(f"config.json: layer_types must name {count} layers, each {SLIDING} or {FULL}")
    return tuple(types)


def head_layout(heads: int, kv_heads: int, head_dim: int, *, shared_kv: bool = False) -> HeadLayout:
    """LoadError for head counts that do not divide."""
    if heads % kv_heads or head_dim % 2:
        raise LoadError(f"config.json: {heads} heads on {kv_heads} key/value heads of size {head_dim} do not divide")
    return HeadLayout(heads, kv_heads, head_dim, shared_kv)


def settings_of(config: Json, key: str) -> Json:
    """An object of settings, {} where it is absent or null."""
    value = config.get(key)
    if value is not None and not isinstance(value, dict):
        raise LoadError(f"config.json: {key} must be an object, not {value!r}")
    return value or {}


def rope_parameters(text: Json) -> Json:
    """`rope_parameters` by layer type, {} where there are none."""
    given = settings_of(text, "rope_parameters")
    unknown = set(given) - {SLIDING, FULL}
    if unknown:
        raise LoadError(f"config.json: rope_parameters has no layer type {', '.join(sorted(map(repr, unknown)))}")
    return given


def window_size(text: Json, layer_types: tuple[str, ...], default: int) -> int:
    """`sliding_window`, 0 where no layer slides."""
    return integer(text, "sliding_window", default, largest=_LARGEST_WINDOW) if SLIDING in layer_types else 0
