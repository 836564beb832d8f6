"""Do an op's rows keep their bits whatever the number of rows is? Measured on this device, op by op, then as a whole.

Everything runs on random weights of a model's shapes: two layers, one of each kind, in the scheme at hand. A row is
compared bit for bit with itself in the longest run. In floating-point products half of the terms cancel for half of the
channels: what is left is the rounding of the sums, which the one rounding at the end would hide otherwise.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workers.engine.device import choose_scheme, open_card
from workers.engine.fingerprint import cpu_name
from workers.engine.kernels.encode import encode
from workers.engine.kernels.encoding import Activation, Codes
from workers.engine.kernels.gelu_mul import gelu_mul_encode
from workers.engine.kernels.lm_head import lm_head_logprobs
from workers.engine.kernels.lm_head.cpu import VOCAB_CHUNK
from workers.engine.kernels.products import RowRule
from workers.engine.kernels.rms_norm import norm_encode, residual_norm
from workers.engine.kernels.rotary import qkv_norm_rotary, rotary_table
from workers.engine.layers.attention import TreeSelfAttention
from workers.engine.layers.linear import Linear
from workers.engine.load import CPU_DTYPES, cpu_scheme, empty_model, materialize, weight_bytes
from workers.engine.models import GemmaConfig, GemmaModel, model_config
from workers.engine.models.config import read_config
from workers.engine.models.gemma import GemmaLayer
from workers.engine.packing import Share, build_pass
from workers.engine.pipeline import AnyRunner, launch
from workers.engine.quant import Fp8Linear, QuantLinear
from workers.engine.quant.compressed_tensors import Fp8Static
from workers.engine.quant.linear import Blocks
from workers.engine.scheduler import Scheduler
from workers.engine.schemes import check_input_scales, quant_linears
from workers.engine.selfcheck import (
    attention_is_invariant,
    elementwise_is_invariant,
    linear_is_invariant,
    verify_invariance,
)
from workers.engine.sizes import check_gpu_sizes
from workers.engine.warmup import warmup_plan

TILE = 128
"""Row counts are taken around every multiple of it: tiles of other sizes divide it, or are multiples."""

_SMALL = 64  # every count up to it
_HEAD_ROWS = 4096  # at most: the head sees few rows
_VOCAB = 4096  # of the passes as a whole, where the head is not what is looked at
_WEIGHT_ROWS = 1024  # drawn at a time
_INPUT_SCALE = 2.0**-6  # of a normal input: the largest of millions, about 6, stays within 448 codes of it

Outputs = tuple[Tensor, ...]
RowOp = Callable[..., Outputs]


@dataclass(frozen=True, slots=True)
class Finding:
    """What was seen of one op. `first`: the least number of rows at which a row's bits differ; None: never."""

    op: str
    shape: str
    counts: int
    first: int | None
    note: str = ""

    @property
    def invariant(self) -> bool:
        """Whether every row kept its bits."""
        return self.first is None and not self.note

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"invariant": self.invariant}


def row_counts(most: int) -> list[int]:
    """1 … 64, and each multiple of the tile up to `most` with its neighbours."""
    around = (multiple + d for multiple in range(TILE, most + 2, TILE) for d in (-1, 0, 1))
    return sorted({count for count in (*range(1, _SMALL + 1), *around, most) if 1 <= count <= most})


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal shapes and bytes."""
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@torch.inference_mode()
def first_difference(op: RowOp, inputs: Sequence[Tensor], counts: Sequence[int]) -> int | None:
    """The least row count at which `op` gives a row other bits than in the run over all rows.

    inputs  tensors of equally many rows; op takes runs of their rows and gives tensors with a row for each. Runs are
            taken from the beginning and from the end
    """
    most = inputs[0].shape[0]
    whole = op(*(x.clone() for x in inputs))
    for count in counts:
        for start in {0, most - count}:
            run = slice(start, start + count)
            part = op(*(x[run].clone() for x in inputs))
            if not all(same_bits(mine, all_rows[run]) for mine, all_rows in zip(part, whole, strict=True)):
                return count
    return None


# Random models


def draw(*shape: int, device: torch.device, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal values, the same in every run on one kind of device."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device, dtype=dtype)


def cancelling(x: Tensor) -> Tensor:
    """x [·, K] with its first half of K twice, for weights of which the second half undoes the first."""
    half = x.shape[1] // 2
    x[:, half : 2 * half] = x[:, :half]
    return x


def weight_rows(rows: int, k: int, device: torch.device, seed: int) -> Blocks:
    """[rows, K] float32, N(0, 1/K): in every other row the second half of K undoes the first."""

    def blocks() -> Iterator[tuple[int, Tensor]]:
        half = k // 2
        for first in range(0, rows, _WEIGHT_ROWS):
            count = min(_WEIGHT_ROWS, rows - first)
            values = draw(count, k, device=device, seed=seed + first).float().mul_(k**-0.5)
            values[::2, half : 2 * half] = -values[::2, :half]
            yield first, values

    return blocks


def _fill(linear: Linear | QuantLinear, seed: int) -> None:
    """Random weights in whatever form the linear keeps them."""
    device, k = linear.weight.device, linear.weight.shape[1]
    first = 0
    for part, rows in enumerate(linear.parts):
        blocks = weight_rows(rows, k, device, seed + 7919 * part)
        if isinstance(linear, QuantLinear):
            linear.put(part, blocks)
        else:
            for row, values in blocks():
                linear.weight[first + row : first + row + len(values)] = values
        first += rows
    if isinstance(linear, Fp8Linear):
        linear.input_scales.fill_(_INPUT_SCALE)
    if isinstance(linear, QuantLinear):
        linear.loaded()


@torch.no_grad()
def random_model(facts: GemmaConfig, scheme: str, device: torch.device) -> GemmaModel:
    """One layer of each kind that the model has, in its shapes, with random weights."""
    kinds = tuple(dict.fromkeys(facts.layer_types))
    facts = replace(facts, layer_types=kinds, layouts={kind: facts.layouts[kind] for kind in kinds})
    if device.type == "cpu":
        model = GemmaModel(facts, CPU_DTYPES[scheme])
    else:
        model = empty_model(facts, scheme)
        materialize(model, device)
    for seed, module in enumerate(model.modules()):
        if isinstance(module, Linear | QuantLinear):
            _fill(module, seed)
    for seed, (name, parameter) in enumerate(model.named_parameters()):
        if parameter.dim() == 1:  # norms and layer scalars
            parameter.copy_(draw(*parameter.shape, device=device, seed=seed).float().mul_(0.3).add_(1.0))
        elif name.endswith("embed_tokens.weight"):
            parameter.copy_(draw(*parameter.shape, device=device, seed=seed))
    model.loaded()
    if quant_linears(model):
        check_input_scales(model)
    return model


# Ops


class Sweep:
    """All findings of one model, scheme and device. `rows`: the longest run."""

    def __init__(self, facts: GemmaConfig, scheme: str, device: torch.device, rows: int, rule: RowRule) -> None:
        self.facts, self.scheme, self.device, self.rows, self.rule = facts, scheme, device, rows, rule
        self.counts = row_counts(rows)
        self.model = random_model(replace(facts, vocab_size=min(facts.vocab_size, _VOCAB)), scheme, device)

    def findings(self) -> Iterator[Finding]:
        """One after the other, as they are found."""
        yield from self._linears()
        for layer in self.model.model.layers:
            assert isinstance(layer, GemmaLayer)
            yield from self._layer(layer)
        yield self._head()
        yield self._passes()

    def _find(self, op: str, shape: str, run: RowOp, *inputs: Tensor) -> Finding:
        return Finding(op, shape, len(self.counts), first_difference(run, inputs, self.counts))

    def _draw(self, width: int, seed: int, dtype: torch.dtype | None = None) -> Tensor:
        """[rows, width], of the type that linears write unless another is named."""
        dtype = self.model.head_weight.dtype if dtype is None else dtype
        return cancelling(draw(self.rows, width, device=self.device, seed=seed, dtype=dtype))

    def _linears(self) -> Iterator[Finding]:
        seen = set()
        for name, module in self.model.named_modules():
            if not isinstance(module, Linear | QuantLinear):
                continue
            o, k = module.weight.shape
            if (k, o, module.parts) in seen:
                continue
            seen.add((k, o, module.parts))
            yield self._linear(name.rpartition(".")[2], module)

    def _linear(self, name: str, module: Linear | QuantLinear) -> Finding:
        """The product alone: its codes are made once, for all rows."""
        o, k = module.weight.shape
        x = encode(self._draw(k, seed=k), module.encoding)
        own_scale = isinstance(x, Codes) and x.scale.shape[0] > 1

        def product(values: Tensor, *scale: Tensor) -> Outputs:
            if not isinstance(x, Codes):
                return (module(values, self.rule),)
            codes = values.view(x.values.dtype)
            return (module(Codes(codes, scale[0] if own_scale else x.scale), self.rule),)

        values = x.values.view(torch.uint8) if isinstance(x, Codes) else x
        scales = [x.scale] if isinstance(x, Codes) and own_scale else []
        return self._find(name, f"{k} → {o}", product, values, *scales)

    def _layer(self, layer: GemmaLayer) -> Iterator[Finding]:
        attention, mlp, facts = layer.self_attn, layer.mlp, self.facts
        hidden, inner = facts.hidden_size, facts.intermediate_size
        eps = facts.eps
        kind = f"layer with heads of {attention.shape.layout.head_dim}"
        x, h = self._draw(hidden, 11, torch.float32), self._draw(hidden, 12)
        scale = layer.input_layernorm.scale
        into = layer.input_encoding

        def norm(rows: Tensor) -> Outputs:
            return plain(norm_encode(rows, scale, eps, into))

        def residual(rows: Tensor, added: Tensor) -> Outputs:
            post = layer.post_attention_layernorm.scale
            following = mlp.gate_up_proj.encoding
            return rows, *plain(residual_norm(rows, added, post, layer.layer_scalar, scale, eps, following))

        def activation(rows: Tensor) -> Outputs:
            return plain(gelu_mul_encode(rows, mlp.down_proj.encoding, mlp.gate_up_proj.pending))

        yield self._find("norm", f"{hidden}, {kind}", norm, x)
        yield self._find("residual and norm", f"{hidden}, {kind}", residual, x, h)
        yield self._find("gated activation", f"{inner}, {kind}", activation, self._draw(2 * inner, 13))
        yield self._rotary(attention)
        width = attention.o_proj.weight.shape[1]
        encoding = attention.o_proj.encoding
        if encoding.kind not in ("float", "fp8_static"):  # else attention writes what the linear reads
            yield self._find("encode", f"{width}, {kind}", lambda y: plain(encode(y, encoding)), self._draw(width, 14))

    def _rotary(self, attention: TreeSelfAttention) -> Finding:
        layout = attention.shape.layout
        kind = next(kind for kind, other in self.facts.layouts.items() if other == layout)
        inv_freq = self.facts.rotary[kind].inv_freq(layout.head_dim).to(self.device)
        positions = torch.arange(self.rows, device=self.device) * 37 % 65_536

        def rotary(qkv: Tensor, at: Tensor) -> Outputs:
            outputs = qkv_norm_rotary(
                qkv,
                layout,
                attention.q_scale,
                attention.k_norm.scale,
                *rotary_table(at, inv_freq),
                attention.shape.eps,
                norm_v=attention.shape.value_norm,
                pending=attention.projection.pending,
            )
            if qkv.is_cuda:
                return outputs
            return tuple(y.transpose(0, 1)[: len(qkv)] for y in outputs)  # the CPU's form has the heads first

        return self._find("split, norm, rotary", f"{layout.width}", rotary, self._draw(layout.width, 15), positions)

    def _head(self) -> Finding:
        rows, vocab = min(self.rows, _HEAD_ROWS), self.facts.vocab_size
        weight = draw(vocab, self.facts.hidden_size, device=self.device, seed=16)
        weight = weight.to(CPU_DTYPES[self.scheme]) if self.device.type == "cpu" else weight
        columns = torch.arange(rows, device=self.device) * 7919 % vocab
        x = draw(rows, self.facts.hidden_size, device=self.device, seed=17, dtype=torch.float32)

        def head(hidden: Tensor, cols: Tensor) -> Outputs:
            entries = torch.arange(len(hidden), device=self.device)
            padded = torch.cat([hidden, hidden[-1:].expand(-len(hidden) % self._head_step, -1)])
            return (lm_head_logprobs(padded, weight, entries, cols, self.facts.final_softcap, self.rule),)

        counts = row_counts(rows)
        shape = f"{self.facts.hidden_size} → {vocab}"
        return Finding("head", shape, len(counts), first_difference(head, [x, columns], counts))

    @property
    def _head_step(self) -> int:
        """Rows that the CPU's head pads to; the GPU's takes any number."""
        return self.rule.padded(1) if self.device.type == "cpu" else 1

    def _passes(self) -> Finding:
        """A few contents with questions, each alone, then in company, in another order and cut over several passes."""
        runner = self._runner()
        window = self.facts.sliding_window
        longest = max(16, min(self.rows // 2, window + 200))
        jobs = [[longest], [1], [70, 5, 64], [300 if self.rows >= 1024 else 30, 130 if self.rows >= 1024 else 13]]
        plans = [self._plan(contents, seed) for seed, contents in enumerate(jobs)]
        total = sum(len(plan.tokens) for plan in plans)
        alone = [self._run(runner, [plan], len(plan.tokens))[0] for plan in plans]
        runs = {
            "together": self._run(runner, plans, total),
            "in reverse": self._run(runner, plans[::-1], total)[::-1],
            "over several passes": self._run(runner, plans, max(longest + 40, total // 5)),
        }
        differing = [
            name
            for name, values in runs.items()
            if not all(same_bits(a, b) for a, b in zip(values, alone, strict=True))
        ]
        runner.close()
        note = f"other bits {' and '.join(differing)}" if differing else ""
        return Finding("whole passes", f"{len(plans)} requests, {total} tokens", len(runs), None, note)

    def _runner(self) -> AnyRunner:
        if self.device.type == "cpu":
            from workers.engine.runner import Runner

            return Runner(self.model, self.rule)
        from workers.engine.cuda_runner import CudaRunner

        return CudaRunner(self.model, self.rule)

    def _plan(self, contents: list[int], seed: int) -> Any:
        plan = warmup_plan(contents, 12, 9)
        ids = np.random.default_rng(seed)
        vocab = self.model.config.vocab_size
        return replace(
            plan,
            tokens=ids.integers(0, vocab, len(plan.tokens), dtype=np.int32),
            cols=ids.integers(0, vocab, len(plan.cols), dtype=np.int32),
        )

    def _run(self, runner: AnyRunner, plans: list[Any], budget: int) -> list[Tensor]:
        """The values of each plan, run together in passes of `budget` tokens."""
        scheduler = Scheduler(budget, budget)
        for key, plan in enumerate(plans):
            scheduler.add(key, plan)
        out = [torch.full((len(plan.cols),), float("nan")) for plan in plans]
        while len(scheduler):
            packed = build_pass(scheduler.next_pass())
            values = torch.from_numpy(launch(runner, runner.stage(packed)).pending.wait())
            for i, share in enumerate(packed.shares):
                entries = slice(int(packed.share_entries[i]), int(packed.share_entries[i + 1]))
                out[_number(share)][torch.from_numpy(packed.targets[entries])] = values[entries]
        for key in range(len(plans)):
            runner.free(key)
        return out


def _number(share: Share) -> int:
    assert isinstance(share.key, int)
    return share.key


def plain(x: Activation) -> Outputs:
    """An activation as tensors with a row for each row; one scale for all rows stands in every row."""
    if not isinstance(x, Codes):
        return (x,)
    return x.values, x.scale.expand(x.values.shape[0]).contiguous()


def cpu_findings(facts: GemmaConfig, scheme: str, rule: RowRule) -> Iterator[Finding]:
    """What the engine measures at every start on the CPU, shape by shape, under the row rule that it found."""
    dtype = CPU_DTYPES[scheme]
    model = empty_model(facts, "bf16")
    products = [("linear", k, o) for k, o in model.product_shapes()]
    for op, k, o in [*products, ("head", facts.hidden_size, VOCAB_CHUNK)]:
        kept = linear_is_invariant(k, o, rule, dtype)
        yield Finding(op, f"{k} → {o}", 1, None, "" if kept else "depends on the row count")
    for head_dim in sorted(model.head_dims()):
        kept = attention_is_invariant(head_dim, rule)
        yield Finding("attention", f"heads of {head_dim}", 1, None, "" if kept else "depends on the row count")
    kept = elementwise_is_invariant()
    yield Finding("exp, tanh, cos, sin, sums", "", 1, None, "" if kept else "depend on the place")


@dataclass(frozen=True, slots=True)
class Check:
    """What is swept, and its findings as they come."""

    scheme: str
    device_name: str
    compute_capability: str | None
    findings: Iterator[Finding]


def selfcheck(config_dir: Path, device: str, quant: str, rows: int) -> Check:
    """Sweep the model that a config.json describes. LoadError, RuntimeError as at the start of an engine."""
    facts = model_config(config_dir)
    if device == "cpu":
        scheme = cpu_scheme(quant)
        model = empty_model(facts, "bf16")
        rule, _ = verify_invariance(model.product_shapes(), facts.hidden_size, model.head_dims(), CPU_DTYPES[scheme])
        return Check(scheme, cpu_name(), None, cpu_findings(facts, scheme, rule))
    card = open_card(device)
    has_scales = Fp8Static.from_json(read_config(config_dir)) is not None
    scheme = choose_scheme(
        quant, card, has_scales=has_scales or quant == "fp8s", bf16_bytes=weight_bytes(empty_model(facts, "bf16"))
    )
    check_gpu_sizes(facts, empty_model(facts, scheme), scheme)
    name = f"{card.capability[0]}.{card.capability[1]}"
    return Check(scheme, card.name, name, Sweep(facts, scheme, card.device, rows, RowRule()).findings())
