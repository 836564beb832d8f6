"""Each op: its CPU version against the reference, and rows that do not depend on the other rows."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from workers.engine.kernels.embedding import embedding
from workers.engine.kernels.embedding import reference as embedding_reference
from workers.engine.kernels.gelu_mul import gelu_mul
from workers.engine.kernels.gelu_mul import reference as gelu_reference
from workers.engine.kernels.linear import linear
from workers.engine.kernels.linear import reference as linear_reference
from workers.engine.kernels.lm_head import cpu as lm_head_cpu
from workers.engine.kernels.lm_head import half as lm_head_half
from workers.engine.kernels.lm_head import lm_head_logprobs
from workers.engine.kernels.lm_head import reference as lm_head_reference
from workers.engine.kernels.products import RowRule
from workers.engine.kernels.rms_norm import reference as rms_reference
from workers.engine.kernels.rms_norm import rms_norm
from workers.engine.kernels.rotary import HeadLayout, qkv_norm_rotary, rotary_table
from workers.engine.kernels.rotary import reference as rotary_reference

BOUND = 1e-5
"""Relative root-mean-square error of every op against its reference."""

FREE, FIXED = RowRule(), RowRule(64, 64)
SIZES = [1, 3, 16, 63, 500]


def error(ours: Tensor, theirs: Tensor) -> float:
    """Root mean square of the difference over that of the reference; infinite for a value that is not finite."""
    if not torch.isfinite(ours).all():
        return float("inf")
    return float((ours.double() - theirs.double()).square().mean().sqrt() / theirs.double().square().mean().sqrt())


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rule", [FREE, FIXED], ids=["free", "fixed"])
@pytest.mark.parametrize("rows", SIZES)
def test_linear(rows: int, rule: RowRule) -> None:
    x, weight = draw(rows, 72), draw(88, 72, seed=1)
    assert error(linear(x, weight, rule), linear_reference.linear(x, weight)) < BOUND


@pytest.mark.parametrize("rows", SIZES)
def test_rms_norm(rows: int) -> None:
    x, scale = draw(rows, 72) * 3, draw(72, seed=1)
    assert error(rms_norm(x, scale, 1e-6), rms_reference.rms_norm(x, scale, 1e-6)) < BOUND


def test_rms_norm_keeps_its_epsilon() -> None:
    x, scale = draw(16, 72) * 1e-3, torch.ones(72)
    assert error(rms_norm(x, scale, 1e-2), rms_reference.rms_norm(x, scale, 1e-2)) < BOUND


@pytest.mark.parametrize("rows", SIZES)
def test_gelu_mul(rows: int) -> None:
    x = draw(rows, 2 * 88) * 4
    assert error(gelu_mul(x.clone()), gelu_reference.gelu_mul(x)) < BOUND


def test_gelu_mul_far_out() -> None:
    """Where the exponential overflows the value is zero, and large inputs pass through."""
    x = torch.tensor([[-1e4, -60.0, -12.0, 0.0, 12.0, 60.0, 1e4, 1.0, *([2.0] * 8)]])
    assert error(gelu_mul(x.clone()), gelu_reference.gelu_mul(x)) < BOUND


def test_embedding() -> None:
    tokens, weight = torch.tensor([5, 0, 5, 10]), draw(11, 72)
    assert same_bits(embedding(tokens, weight, 8.5), embedding_reference.embedding(tokens, weight, 8.5))


LAYOUTS = [HeadLayout(4, 2, 16), HeadLayout(3, 1, 24), HeadLayout(2, 2, 8), HeadLayout(4, 2, 16, True)]


@pytest.mark.parametrize("norm_v", [False, True], ids=["plain-v", "norm-v"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("rows", [16, 63])
def test_qkv_norm_rotary(layout: HeadLayout, rows: int, norm_v: bool) -> None:
    d = layout.head_dim
    cos, sin = rotary_table(torch.arange(rows) * 7, 10_000 ** -(torch.arange(0, d, 2) / d))
    arguments = (draw(rows, layout.width), layout, draw(d, seed=1), draw(d, seed=2), cos, sin, 1e-6)
    results = qkv_norm_rotary(*arguments, norm_v=norm_v)
    for ours, theirs in zip(results, rotary_reference.qkv_norm_rotary(*arguments, norm_v), strict=True):
        assert ours.shape == theirs.shape
        assert error(ours, theirs) < BOUND


@pytest.mark.parametrize("rule", [FREE, FIXED], ids=["free", "fixed"])
@pytest.mark.parametrize("softcap", [None, 5.0], ids=["plain", "soft-cap"])
@pytest.mark.parametrize("rows", [1, 17, 70])
def test_lm_head(rows: int, softcap: float | None, rule: RowRule, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary over several chunks, the last one ragged; rows over several sweeps."""
    monkeypatch.setattr(lm_head_cpu, "VOCAB_CHUNK", 64)
    monkeypatch.setattr(lm_head_cpu, "MAX_ROWS", 32)
    x, weight = draw(rows, 72), draw(811, 72, seed=1)
    entry_rows = torch.arange(rows).repeat_interleave(7)
    entry_cols = torch.randint(0, 811, (7 * rows,), generator=torch.Generator().manual_seed(2))
    ours = lm_head_logprobs(x, weight, entry_rows, entry_cols, softcap, rule)
    theirs = lm_head_reference.lm_head_logprobs(x, weight, entry_rows, entry_cols, softcap)
    assert error(ours, theirs) < BOUND


def test_lm_head_without_entries() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert lm_head_logprobs(draw(16, 72), draw(811, 72), none, none, None, FREE).shape == (0,)


_LAYOUT = HeadLayout(4, 2, 16)
_WEIGHT, _SCALE = draw(88, 72, seed=5), draw(72, seed=6)


def _heads(x: Tensor) -> Tensor:
    """The q of every head as rows."""
    cos, sin = torch.full((len(x), 8), 0.8), torch.full((len(x), 8), 0.6)
    q, _, _ = qkv_norm_rotary(x, _LAYOUT, _SCALE[:16], _SCALE[16:32], cos, sin, 1e-6)
    return q.transpose(0, 1).reshape(len(x), -1)


def _head(x: Tensor, weight: Tensor = _WEIGHT) -> Tensor:
    rows = torch.arange(len(x)).repeat_interleave(3)
    cols = torch.tensor([0, 40, 87]).repeat(len(x))
    return lm_head_logprobs(x, weight, rows, cols, 7.0, FREE).view(len(x), 3)


ROW_OPS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "linear": (72, lambda x: linear(x, _WEIGHT, FREE)),
    "linear-fixed": (72, lambda x: linear(x, _WEIGHT, FIXED)),
    "rms_norm": (72, lambda x: rms_norm(x, _SCALE, 1e-6)),
    "gelu_mul": (176, lambda x: gelu_mul(x.clone())),
    "rotary": (_LAYOUT.width, _heads),
    "lm_head": (72, _head),
    "lm_head-bf16": (72, lambda x: _head(x, _WEIGHT.bfloat16())),
    "linear-bf16": (72, lambda x: linear(x.bfloat16(), _WEIGHT.bfloat16(), FREE)),
    "linear-bf16-fixed": (72, lambda x: linear(x.bfloat16(), _WEIGHT.bfloat16(), FIXED)),
    "rms_norm-bf16": (72, lambda x: rms_norm(x, _SCALE, 1e-6, torch.bfloat16)),
    "gelu_mul-bf16": (176, lambda x: gelu_mul(x.bfloat16())),
    "rotary-bf16": (_LAYOUT.width, lambda x: _heads(x.bfloat16())),
}


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name", ROW_OPS)
def test_rows_do_not_depend_on_other_rows(name: str, threads: int) -> None:
    """Any number of rows from 16 on, at any offset, against one large call on two threads."""
    width, op = ROW_OPS[name]
    x = draw(1100, width, seed=9)
    whole = op(x)
    torch.set_num_threads(threads)
    for first, count in ((0, 16), (1, 16), (5, 17), (3, 48), (7, 250), (13, 999)):
        assert same_bits(op(x[first : first + count]), whole[first : first + count]), (first, count)


@pytest.mark.parametrize("name", ["linear", "linear-fixed", "lm_head", "linear-bf16", "lm_head-bf16"])
def test_even_a_single_row(name: str) -> None:
    width, op = ROW_OPS[name]
    x = draw(100, width, seed=9)
    assert same_bits(op(x[37:38]), op(x)[37:38])


def _rotated(x: Tensor) -> Tensor:
    """q, k and v side by side, without the zero row, as rows."""
    cos, sin = rotary_table(torch.arange(len(x)), 10_000 ** -(torch.arange(0, 16, 2) / 16))
    arguments = (_LAYOUT, _SCALE[:16], _SCALE[16:32], cos, sin, 1e-6)
    q, k, v = qkv_norm_rotary(x, *arguments, norm_v=True)
    return torch.cat(
        [q.transpose(0, 1).reshape(len(x), -1), *(t[:, :-1].transpose(0, 1).flatten(1) for t in (k, v))], 1
    )


HALF_OPS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "linear": (72, lambda x: linear(x, _WEIGHT.bfloat16().to(x.dtype), FREE)),
    "rms_norm": (72, lambda x: rms_norm(x, _SCALE, 1e-6, x.dtype)),
    "gelu_mul": (176, lambda x: gelu_mul(x.clone())),
    "rotary": (_LAYOUT.width, _rotated),
}


@pytest.mark.parametrize("rows", [16, 300])
@pytest.mark.parametrize("name", HALF_OPS)
def test_bf16_is_float32_rounded_once(name: str, rows: int) -> None:
    """Bit for bit, but where float32 sums in another order fall on the other side of a rounding boundary."""
    width, op = HALF_OPS[name]
    x = draw(rows, width, seed=3).bfloat16()
    ours, whole = op(x), op(x.float())
    assert ours.dtype == torch.bfloat16
    assert (ours != whole.bfloat16()).float().mean() < 1e-3
    assert error(ours, whole) < 2**-8


def test_a_bf16_embedding_is_scaled_in_float32() -> None:
    weight = draw(88, 72, seed=5).bfloat16()
    tokens = torch.tensor([5, 0, 87])
    assert same_bits(embedding(tokens, weight, 8.5), embedding(tokens, weight.float(), 8.5))


@pytest.fixture
def narrow_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary of 811 has several chunks and groups, the last ones ragged; rows over several sweeps."""
    monkeypatch.setattr(lm_head_half, "VOCAB_CHUNK", 256)
    monkeypatch.setattr(lm_head_half, "EXACT_EVERY", 64)
    monkeypatch.setattr(lm_head_half, "_STEP", 37)
    monkeypatch.setattr(lm_head_cpu, "MAX_ROWS", 32)


@pytest.mark.usefixtures("narrow_head")
@pytest.mark.parametrize("rule", [FREE, FIXED], ids=["free", "fixed"])
@pytest.mark.parametrize("softcap", [None, 5.0], ids=["plain", "soft-cap"])
@pytest.mark.parametrize("rows", [1, 17, 70])
def test_bf16_lm_head(rows: int, softcap: float | None, rule: RowRule) -> None:
    """The sum over the vocabulary is off by its roundings, the entries of a row against each other are not."""
    x, weight = draw(rows, 72), draw(811, 72, seed=1).bfloat16()
    entry_rows = torch.arange(rows).repeat_interleave(7)
    entry_cols = torch.randint(0, 811, (7 * rows,), generator=torch.Generator().manual_seed(2))
    ours = lm_head_logprobs(x, weight, entry_rows, entry_cols, softcap, rule).view(rows, 7)
    theirs = lm_head_reference.lm_head_logprobs(x, weight, entry_rows, entry_cols, softcap).view(rows, 7)
    assert (ours - theirs).abs().max() < 0.02
    assert error(ours[:, 1:] - ours[:, :1], theirs[:, 1:] - theirs[:, :1]) < BOUND


@pytest.mark.usefixtures("narrow_head")
def test_the_largest_bf16_logits_are_exact() -> None:
    """Two tokens of different groups share nearly everything: rounded logits of this size would be off by 0.1."""
    weight = draw(811, 72, seed=1).bfloat16()
    x = (weight[5].float() + weight[700].float())[None].repeat(2, 1)
    x = x * 40 / (x[0] @ weight[5].float())
    rows, cols = torch.tensor([0, 0, 1]), torch.tensor([5, 700, 5])
    ours = lm_head_logprobs(x, weight, rows, cols, None, FREE)
    assert error(ours, lm_head_reference.lm_head_logprobs(x, weight, rows, cols, None)) < 1e-4
