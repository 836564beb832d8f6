"""Gemma 3 (text), bottom-up: configuration, MLP, decoder layer, model with its tied head.

The reference is transformers 5.17.0, `models/gemma3/modeling_gemma3.py`.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from workers.engine.errors import LoadError
from workers.engine.kernels.embedding import embedding
from workers.engine.kernels.gelu_mul import gelu_mul
from workers.engine.kernels.lm_head import lm_head_logprobs
from workers.engine.kernels.products import RowRule
from workers.engine.kernels.rotary import HeadLayout, rotary_table
from workers.engine.layers.attention import AttentionShape, Rotary, TreeSelfAttention
from workers.engine.layers.forward import Forward
from workers.engine.layers.linear import Linear
from workers.engine.layers.norm import OnePlusRMSNorm
from workers.engine.models.config import Json, RotarySettings, integer, number, optional_number, require

log = logging.getLogger(__name__)

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True)
class GemmaConfig:
    """What the forward needs of config.json. Absent keys take the defaults of transformers' `Gemma3TextConfig`."""

    model_types: ClassVar[tuple[str, ...]] = ("gemma3_text", "gemma3")

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layout: HeadLayout
    scaling: float
    eps: float
    layer_types: tuple[str, ...]
    sliding_window: int
    rotary: dict[str, RotarySettings]
    final_softcap: float | None
    tied_head: bool

    @classmethod
    def from_json(cls, config: Json) -> "GemmaConfig":
        """From a whole config.json: of the text model, or of the multimodal one around it."""
        text = config if config["model_type"] == "gemma3_text" else config.get("text_config")
        if not isinstance(text, dict):
            raise LoadError("config.json: text_config is missing")
        require(text, "hidden_activation", "gelu_pytorch_tanh", ("gelu_pytorch_tanh",))
        require(text, "attention_bias", False, (False,))
        require(text, "use_bidirectional_attention", False, (False, None))
        if text.get("attn_logit_softcapping") is not None:
            log.warning(
                "config.json: attn_logit_softcapping is ignored for gemma3, as the reference implementation does"
            )
        layer_types = _layer_types(text)
        return cls(
            vocab_size=integer(text, "vocab_size", 262_208),
            hidden_size=integer(text, "hidden_size", 2304),
            intermediate_size=integer(text, "intermediate_size", 9216),
            layout=_layout(text),
            scaling=number(text, "query_pre_attn_scalar", 256) ** -0.5,
            eps=number(text, "rms_norm_eps", 1e-6),
            layer_types=layer_types,
            sliding_window=integer(text, "sliding_window", 4096) if SLIDING in layer_types else 0,
            rotary=_rotary(text),
            final_softcap=optional_number(text, "final_logit_softcapping"),
            tied_head=bool(config.get("tie_word_embeddings", True)),
        )

    def window(self, index: int) -> int | None:
        """The window of a layer, None where it is full."""
        return self.sliding_window if self.layer_types[index] == SLIDING else None


def _layout(text: Json) -> HeadLayout:
    heads, kv = integer(text, "num_attention_heads", 8), integer(text, "num_key_value_heads", 4)
    head_dim = integer(text, "head_dim", 256)
    if heads % kv or head_dim % 2:
        raise LoadError(f"config.json: {heads} heads on {kv} key/value heads of size {head_dim} do not divide")
    return HeadLayout(heads, kv, head_dim)


def _layer_types(text: Json) -> tuple[str, ...]:
    """`layer_types`, or every n-th layer full by `sliding_window_pattern` (6 where neither is given)."""
    count = integer(text, "num_hidden_layers", 26)
    types = text.get("layer_types")
    if types is None:
        key = "_sliding_window_pattern" if "_sliding_window_pattern" in text else "sliding_window_pattern"
        pattern = integer(text, key, 6)
        return tuple(SLIDING if (i + 1) % pattern else FULL for i in range(count))
    if not isinstance(types, list) or len(types) != count or not set(types) <= {SLIDING, FULL}:
        raise LoadError(f"config.json: layer_types must name {count} layers, each {SLIDING} or {FULL}")
    return tuple(types)


def _rotary(text: Json) -> dict[str, RotarySettings]:
    """Both spellings: `rope_parameters` per layer type, or `rope_theta`, `rope_local_base_freq` and `rope_scaling`."""
    given = text.get("rope_parameters") or {}
    unknown = set(given) - {SLIDING, FULL}
    if unknown:
        raise LoadError(f"config.json: rope_parameters has no layer type {', '.join(sorted(map(repr, unknown)))}")
    full = dict(given.get(FULL) or {}) | dict(text.get("rope_scaling") or {})
    return {
        FULL: RotarySettings.from_json(FULL, full, number(text, "rope_theta", 1_000_000.0)),
        SLIDING: RotarySettings.from_json(
            SLIDING, dict(given.get(SLIDING) or {}), number(text, "rope_local_base_freq", 10_000.0)
        ),
    }


class GemmaMLP(nn.Module):
    """x [T, K] → down(gelu_tanh(gate(x)) · up(x)) [T, K]."""

    def __init__(self, config: GemmaConfig) -> None:
        super().__init__()
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor, rule: RowRule) -> Tensor:
        return self.down_proj(gelu_mul(self.gate_up_proj(x, rule)), rule)  # type: ignore[no-any-return]


class GemmaLayer(nn.Module):
    """One decoder layer: norm, attention, norm, residual; norm, MLP, norm, residual."""

    def __init__(self, config: GemmaConfig, index: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.eps
        shape = AttentionShape(config.layout, config.scaling, eps, config.window(index))
        self.self_attn = TreeSelfAttention(hidden, shape, index)
        self.mlp = GemmaMLP(config)
        self.input_layernorm = OnePlusRMSNorm(hidden, eps)
        self.post_attention_layernorm = OnePlusRMSNorm(hidden, eps)
        self.pre_feedforward_layernorm = OnePlusRMSNorm(hidden, eps)
        self.post_feedforward_layernorm = OnePlusRMSNorm(hidden, eps)

    def forward(self, x: Tensor, rotary: Rotary, fwd: Forward, rows: Tensor | None) -> Tensor:
        """x [T, K] → [T, K], or [R, K] when only `rows` go on: the last layer's other rows serve as keys alone."""
        attended = self.self_attn(self.input_layernorm(x), rotary, fwd)
        if rows is not None:
            x, attended = x.index_select(0, rows), attended.index_select(0, rows)
        attended = self.self_attn.o_proj(attended, fwd.rule)
        x = x + self.post_attention_layernorm(attended)
        inner = self.mlp(self.pre_feedforward_layernorm(x), fwd.rule)
        return x.add_(self.post_feedforward_layernorm(inner))


class GemmaBody(nn.Module):
    """Embedding, layers, final norm: the part that the checkpoint calls `model`."""

    def __init__(self, config: GemmaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(GemmaLayer(config, i) for i in range(len(config.layer_types)))
        self.norm = OnePlusRMSNorm(config.hidden_size, config.eps)

    def forward(self, fwd: Forward) -> Tensor:
        """The final hidden rows that are read [R, K]."""
        config = self.config
        x = embedding(fwd.tokens, self.embed_tokens.weight, config.hidden_size**0.5)
        tables = {
            kind: rotary_table(fwd.positions, config.rotary[kind].inv_freq(config.layout.head_dim))
            for kind in set(config.layer_types)
        }
        last = len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            x = layer(x, tables[config.layer_types[i]], fwd, fwd.read_rows if i == last else None)
        return self.norm(x)  # type: ignore[no-any-return]


class Embedding(nn.Module):
    """The token table [V, K]: embedding, and the head where it is tied."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, width), requires_grad=False)


class GemmaModel(nn.Module):
    """Gemma 3 for scoring. Parameter names are the checkpoint's, but for the fusions below."""

    fusions: ClassVar[dict[str, tuple[str, ...]]] = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }
    """A parameter's part of the name → the checkpoint's parts that lie in its rows, in this order."""

    prefixes: ClassVar[tuple[tuple[str, str], ...]] = (
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
        ("model.language_model.", "model."),
    )
    """Names of the multimodal checkpoints → names of the text model."""

    decoder: ClassVar[str] = "model.layers."
    """Where the linears begin that a quantized checkpoint stores quantized: all of them do."""

    def __init__(self, config: GemmaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = GemmaBody(config)
        if not config.tied_head:
            self.lm_head = Linear(config.hidden_size, config.vocab_size)

    def fused_rows(self, fused: str) -> tuple[int, ...]:
        """Rows of each part of a fused parameter."""
        layout, inner = self.config.layout, self.config.intermediate_size
        kv = layout.num_kv_heads * layout.head_dim
        return (layout.num_heads * layout.head_dim, kv, kv) if fused == "qkv_proj" else (inner, inner)

    def unused_reason(self, name: str) -> str | None:
        """Why a tensor of the checkpoint is not read; None when there is no reason and it is a fault."""
        if name.startswith(
            ("vision_tower.", "model.vision_tower.", "multi_modal_projector.", "model.multi_modal_projector.")
        ):
            return "media are not served"
        if name == "lm_head.weight" and self.config.tied_head:
            return "the head is tied to the embedding"
        return None

    def loaded(self) -> None:
        """Called once when every weight is in place: derived tensors are made here."""
        for module in self.modules():
            if isinstance(module, OnePlusRMSNorm | TreeSelfAttention):
                module.loaded()

    def kv_shapes(self) -> list[tuple[int, int]]:
        """(N, D) of every layer, for stores."""
        layout = self.config.layout
        return [(layout.num_kv_heads, layout.head_dim)] * len(self.config.layer_types)

    def windows(self) -> tuple[int | None, ...]:
        """The distinct windows of the layers."""
        return tuple({self.config.window(i) for i in range(len(self.config.layer_types))})

    def product_shapes(self) -> Iterator[tuple[int, int]]:
        """(K, O) of every distinct linear product, the head left out: it runs in chunks of its own."""
        seen = {tuple(m.weight.shape) for m in self.model.modules() if isinstance(m, Linear)}
        return ((k, o) for o, k in sorted(seen))

    @property
    def head_weight(self) -> Tensor:
        """[V, K]."""
        return self.model.embed_tokens.weight if self.config.tied_head else self.lm_head.weight

    @torch.inference_mode()
    def logprobs(self, fwd: Forward, entry_rows: Tensor, entry_cols: Tensor) -> Tensor:
        """log P at the entries [C]: entry c reads row entry_rows[c] of `fwd.read_rows` at vocabulary id entry_cols[c]."""
        hidden = self.model(fwd)
        return lm_head_logprobs(hidden, self.head_weight, entry_rows, entry_cols, self.config.final_softcap, fwd.rule)
