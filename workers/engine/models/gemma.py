"""Gemma 3 and Gemma 4 (text), bottom-up: MLP, decoder layer, model with its tied head.

The reference is transformers 5.17.0, `models/gemma3/modeling_gemma3.py`, `models/gemma4/modeling_gemma4.py` and
`models/gemma4_unified/modeling_gemma4_unified.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from workers.engine.kernels.embedding import embedding
from workers.engine.kernels.encoding import Activation, Encoding, select_rows, split_rows
from workers.engine.kernels.gelu_mul import gelu_mul_encode
from workers.engine.kernels.lm_head import lm_head_logprobs
from workers.engine.kernels.products import RowRule
from workers.engine.kernels.rms_norm import norm_encode, residual_norm
from workers.engine.kernels.rotary import HeadLayout, rotary_table
from workers.engine.layers.attention import AttentionShape, Rotary, TreeSelfAttention
from workers.engine.layers.forward import Forward
from workers.engine.layers.linear import Linear
from workers.engine.layers.norm import RMSNorm
from workers.engine.models.gemma_config import GemmaConfig

MLP_ROWS = 16_384
"""Rows that the MLP takes at a time: bounds its memory in a pass of one long content."""


class GemmaMLP(nn.Module):
    """x [T, K] → down(gelu_tanh(gate(x)) · up(x)) [T, K]."""

    def __init__(self, config: GemmaConfig, dtype: torch.dtype) -> None:
        super().__init__()
        inner = config.intermediate_size
        self.gate_up_proj = Linear(config.hidden_size, inner, inner, dtype=dtype)
        self.down_proj = Linear(inner, config.hidden_size, dtype=dtype)

    def forward(self, x: Activation, rule: RowRule) -> Tensor:
        if self.down_proj.encoding.kind == "fp8_stream":  # one scale for all rows
            return self._rows(x, rule)
        parts = split_rows(x, MLP_ROWS)
        return self._rows(x, rule) if len(parts) == 1 else torch.cat([self._rows(part, rule) for part in parts])

    def _rows(self, x: Activation, rule: RowRule) -> Tensor:
        gate_up = self.gate_up_proj(x, rule)
        inner = gelu_mul_encode(gate_up, self.down_proj.encoding, self.gate_up_proj.pending)
        return self.down_proj(inner, rule)  # type: ignore[no-any-return]


class GemmaLayer(nn.Module):
    """One decoder layer: norm, attention, norm, residual; norm, MLP, norm, residual; in Gemma 4 times a number."""

    def __init__(self, config: GemmaConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, eps, offset = config.hidden_size, config.eps, config.norm_offset
        shape = AttentionShape(
            config.layout(index), config.scaling, eps, offset, config.value_norm, config.window(index), dtype
        )
        self.self_attn = TreeSelfAttention(hidden, shape, index)
        self.mlp = GemmaMLP(config, dtype)
        self.input_layernorm = RMSNorm(hidden, eps, offset, dtype)
        self.post_attention_layernorm = RMSNorm(hidden, eps, offset)
        self.pre_feedforward_layernorm = RMSNorm(hidden, eps, offset, dtype)
        self.post_feedforward_layernorm = RMSNorm(hidden, eps, offset)
        self.layer_scalar = nn.Parameter(torch.empty(1), requires_grad=False) if config.layer_scalars else None

    @property
    def input_encoding(self) -> Encoding:
        """How the layer wants its normalised input."""
        return self.self_attn.projection.encoding

    def forward(
        self, x: Tensor, normed: Activation, following: "Following", rotary: Rotary, fwd: Forward, rows: Tensor | None
    ) -> tuple[Tensor, Activation]:
        """x [T, K] and its input norm → x and the norm that follows, [T, K] each.

        With `rows` [R, K] each: only they go on, and the last layer's other rows serve as keys alone. x is overwritten.
        """
        attended = self.self_attn(normed, rotary, fwd)
        if rows is not None:
            x, attended = x.index_select(0, rows), select_rows(attended, rows)
        attended = self.self_attn.o_proj(attended, fwd.rule)
        inner = residual_norm(
            x,
            attended,
            self.post_attention_layernorm.scale,
            None,
            self.pre_feedforward_layernorm.scale,
            self.pre_feedforward_layernorm.eps,
            self.mlp.gate_up_proj.encoding,
        )
        inner = self.mlp(inner, fwd.rule)
        normed = residual_norm(
            x,
            inner,
            self.post_feedforward_layernorm.scale,
            self.layer_scalar,
            following.norm.scale,
            following.norm.eps,
            following.encoding,
        )
        return x, normed


@dataclass(frozen=True, slots=True)
class Following:
    """The norm behind a layer: the next layer's input norm, or the model's last; and what reads its result."""

    norm: RMSNorm
    encoding: Encoding


class GemmaBody(nn.Module):
    """Embedding, layers, final norm: the part that the checkpoint calls `model`."""

    def __init__(self, config: GemmaConfig, dtype: torch.dtype, residual: torch.dtype) -> None:
        super().__init__()
        self.config, self.residual = config, residual
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = nn.ModuleList(GemmaLayer(config, i, dtype) for i in range(len(config.layer_types)))
        self.norm = RMSNorm(config.hidden_size, config.eps, config.norm_offset)
        self.inv_freq: dict[str, Tensor] = {}

    def loaded(self) -> None:
        """Rotary frequencies of each layer type, computed on the CPU wherever the model lies."""
        config, device = self.config, self.embed_tokens.weight.device
        self.inv_freq = {
            kind: config.rotary[kind].inv_freq(layout.head_dim).to(device) for kind, layout in config.layouts.items()
        }

    def forward(self, fwd: Forward) -> Tensor:
        """The final hidden rows that are read [R, K] float32."""
        config = self.config
        x = embedding(fwd.tokens, self.embed_tokens.weight, config.hidden_size**0.5).to(self.residual)
        tables = {kind: rotary_table(fwd.positions, frequencies) for kind, frequencies in self.inv_freq.items()}
        layers = cast(list[GemmaLayer], list(self.layers))
        following = [Following(layer.input_layernorm, layer.input_encoding) for layer in layers]
        following.append(Following(self.norm, Encoding("float", torch.float32)))
        first = following[0]
        normed = norm_encode(x, first.norm.scale, first.norm.eps, first.encoding)
        for i, layer in enumerate(layers):
            rows = fwd.read_rows if i == len(layers) - 1 else None
            x, normed = layer(x, normed, following[i + 1], tables[config.layer_types[i]], fwd, rows)
        assert isinstance(normed, Tensor)
        return normed


class Embedding(nn.Module):
    """The token table [V, K]: embedding, and the head where it is tied."""

    def __init__(self, size: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, width, dtype=dtype), requires_grad=False)


class GemmaModel(nn.Module):
    """Gemma for scoring. Parameter names are the checkpoint's, but for the fusions below."""

    fusions: ClassVar[dict[str, tuple[str, ...]]] = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "qk_proj": ("q_proj", "k_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }
    """A parameter's part of the name → the checkpoint's parts that lie in its rows, in this order."""

    prefixes: ClassVar[tuple[tuple[str, str], ...]] = (
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
        ("model.language_model.", "model."),
    )
    """Names of the multimodal checkpoints → names of the text model."""

    media_parts: ClassVar[tuple[str, ...]] = (
        "vision_tower.",
        "audio_tower.",
        "multi_modal_projector.",
        "embed_vision.",
        "embed_audio.",
        "vision_embedder.",
    )
    """Where the tensors begin that turn images and sound into rows of the text model."""

    decoder: ClassVar[str] = "model.layers."
    """Where the linears begin that a quantized checkpoint stores quantized: all of them do."""

    def __init__(
        self, config: GemmaConfig, dtype: torch.dtype = torch.float32, residual: torch.dtype = torch.float32
    ) -> None:
        """dtype: of embedding, linears and head, of what the linears read and write, and of keys and values.

        residual: of the stream that the layers add to.
        """
        super().__init__()
        self.config = config
        self.model = GemmaBody(config, dtype, residual)
        if not config.tied_head:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, dtype=dtype)

    def unused_reason(self, name: str) -> str | None:
        """Why a tensor of the checkpoint is not read; None when there is no reason and it is a fault."""
        if name.removeprefix("model.").startswith(self.media_parts):
            return "media are not served"
        return None

    def copy_of(self, name: str) -> str | None:
        """The tensor that a checkpoint may store once more under this name, where config.json makes the two one."""
        if name == "lm_head.weight" and self.config.tied_head:
            return "model.embed_tokens.weight"
        layer, value, _ = name.removeprefix(self.decoder).partition(".self_attn.v_proj.")
        if not value or not layer.isdecimal() or int(layer) >= len(self.model.layers):
            return None
        return name.replace("v_proj", "k_proj") if self.config.layout(int(layer)).shared_kv else None

    def loaded(self) -> None:
        """Called once when every weight is in place: derived tensors are made here."""
        for module in self.modules():
            if isinstance(module, RMSNorm | TreeSelfAttention | GemmaBody):
                module.loaded()

    def kv_shapes(self) -> list[tuple[int, int]]:
        """(N, D) of every layer, for stores."""
        layouts = (self.config.layouts[kind] for kind in self.config.layer_types)
        return [(layout.num_kv_heads, layout.head_dim) for layout in layouts]

    def head_dims(self) -> set[int]:
        """D of every layer."""
        return {layout.head_dim for layout in self.config.layouts.values()}

    def windows(self) -> dict[HeadLayout, tuple[int | None, ...]]:
        """Each layout of heads → the distinct windows of the layers that have it."""
        found: dict[HeadLayout, set[int | None]] = {}
        for i in range(len(self.config.layer_types)):
            found.setdefault(self.config.layout(i), set()).add(self.config.window(i))
        return {layout: tuple(windows) for layout, windows in found.items()}

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
        """log P at the entries [C]: entry c is row entry_rows[c] of `fwd.read_rows` at vocabulary id entry_cols[c]."""
        hidden = self.model(fwd)
        return lm_head_logprobs(hidden, self.head_weight, entry_rows, entry_cols, self.config.final_softcap, fwd.rule)
