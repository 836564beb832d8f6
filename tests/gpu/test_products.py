"""Linears and head on the card, at the shapes of the 12B and the 31B: right, with rows that keep their bits."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.rounding import RMS
from workers.engine.kernels.encoding import Activation, Codes
from workers.engine.kernels.linear import coded_linear, linear
from workers.engine.kernels.lm_head import lm_head_logprobs
from workers.engine.kernels.products import RowRule
from workers.engine.models import GemmaModel, model_config
from workers.engine.quant import SCHEMES, Fp8Linear, QuantLinear, make_linear, reference
from workers.engine.quant.linear import Blocks
from workers.engine.schemes import use_scheme
from workers.engine.weights import load_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU"),
]

RULE = RowRule()
MOST = 16_384
SHAPES = {
    "12b": [(3840, 8192), (3840, 8704), (4096, 3840), (8192, 3840), (3840, 30_720), (15_360, 3840)],
    "31b": [(5376, 16_384), (5376, 18_432), (8192, 5376), (16_384, 5376), (5376, 43_008), (21_504, 5376)],
}
"""K, O of qkv (sliding), qk (full), o_proj of both, gate and up, down."""
ALL_SHAPES = [pytest.param(*shape, id=f"{model}-{shape[0]}x{shape[1]}") for model in SHAPES for shape in SHAPES[model]]
KINDS = ("fp8", "fp8row", "w8a16", "w8a8", "bf16")
COUNTS = sorted({*range(1, 65), *(n + d for e in range(7, 15) for n in (1 << e,) for d in (-1, 0, 1) if n + d <= MOST)})


def generator(seed: int) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


def draw(*shape: int, seed: int) -> Tensor:
    """bf16: a whole operand in float32 would take gigabytes."""
    return torch.randn(*shape, generator=generator(seed), device="cuda", dtype=torch.bfloat16)


def codes(dtype: torch.dtype, *shape: int, seed: int) -> Tensor:
    """Codes as quantized normal values have them: the largest is near the end of the range."""
    if dtype == torch.int8:
        return draw(*shape, seed=seed).mul_(28).round_().clamp_(-127, 127).to(dtype)
    return draw(*shape, seed=seed).mul_(100).clamp_(-448, 448).to(dtype)


def scales(count: int, seed: int) -> Tensor:
    return torch.rand(count, generator=generator(seed), device="cuda") * 0.01 + 0.001


@dataclass(frozen=True, slots=True)
class Operands:
    """One product: x [MOST, K], its scale if it has one, weight [O, K] and its scale."""

    x: Tensor
    x_scale: Tensor | None
    weight: Tensor
    weight_scale: Tensor | None

    @classmethod
    def of(cls, kind: str, k: int, o: int) -> "Operands":
        if kind == "bf16":
            return cls(draw(MOST, k, seed=1), None, draw(o, k, seed=2), None)
        if kind == "w8a16":
            return cls(draw(MOST, k, seed=1), None, codes(torch.int8, o, k, seed=2), scales(o, 3))
        dtype = torch.int8 if kind == "w8a8" else torch.float8_e4m3fn
        one = kind == "fp8"
        x, weight = codes(dtype, MOST, k, seed=1), codes(dtype, o, k, seed=2)
        return cls(x, scales(1 if one else MOST, 4), weight, scales(1 if one else o, 3))

    def rows(self, first: int, count: int) -> Activation:
        x = self.x[first : first + count]
        if self.x_scale is None:
            return x
        shared = self.x_scale.shape[0] == 1
        return Codes(x, self.x_scale if shared else self.x_scale[first : first + count].clone())

    def product(self, first: int, count: int) -> Tensor:
        x = self.rows(first, count)
        if self.weight_scale is None:
            assert isinstance(x, Tensor)
            return linear(x, self.weight, RULE)
        return coded_linear(x, self.weight, self.weight_scale)

    def exact(self, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor | float, Tensor | float]:
        """The sums of some rows and columns in float64, and the scales that belong to them."""
        sums = self.x[rows].double() @ self.weight[columns].double().t()
        x_scale, weight_scale = (
            1.0 if t is None else t if t.shape[0] == 1 else t[at]
            for t, at in ((self.x_scale, rows), (self.weight_scale, columns))
        )
        return sums, x_scale[:, None] if isinstance(x_scale, Tensor) and len(x_scale) > 1 else x_scale, weight_scale


def some(count: int, end: int, seed: int) -> Tensor:
    """Indices: the first, the last, and some between."""
    between = torch.randint(0, end, (count - 2,), generator=generator(seed), device="cuda")
    return torch.cat([torch.tensor([0, end - 1], device="cuda"), between])


@pytest.mark.parametrize(("k", "o"), ALL_SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_products(kind: str, k: int, o: int) -> None:
    """Right on a sample, and the same bits of a row for any number of rows, the sample's among them.

    Off by one rounding to bf16, whose root mean square is `RMS`. On top of it come the sums: in float32 next to nothing
    (5 % of it are allowed); the tensor cores of Hopper add e4m3 products with some 14 bits, for which the whole may
    reach 1.2 times the rounding. Products of int8 are exact, so their results are, bit for bit.
    """
    operands = Operands.of(kind, k, o)
    whole = operands.product(0, MOST)
    rows, columns = some(64, MOST, 5), some(256, o, 6)
    sums, x_scale, weight_scale = operands.exact(rows, columns)
    ours = whole[rows][:, columns]
    if kind == "w8a8":
        assert torch.equal(ours, (sums.float() * x_scale * weight_scale).bfloat16())
    expected = sums * x_scale * weight_scale
    off = float((ours.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt())
    assert off < RMS * (1.2 if kind.startswith("fp8") else 1.05), off / RMS
    changed = [n for n in COUNTS if not torch.equal(operands.product(0, n), whole[:n])]
    assert not changed
    for first, count in ((1, 1), (5, 33), (77, 300), (1000, 129)):
        assert torch.equal(operands.product(first, count), whole[first : first + count]), (first, count)


@contextmanager
def compilations() -> Iterator[list[str]]:
    """The kernels that Triton specializes while this lasts, from its cache on disk or anew."""
    from triton import knobs

    found: list[str] = []

    def heard(*, fn: Any, **_more: Any) -> None:
        found.append(fn.name)

    before, knobs.runtime.jit_post_compile_hook = knobs.runtime.jit_post_compile_hook, heard
    try:
        yield found
    finally:
        knobs.runtime.jit_post_compile_hook = before


def test_nothing_is_compiled_for_a_number_of_rows() -> None:
    operands = [Operands.of(kind, 1024, 512) for kind in ("w8a16", "w8a8", "bf16")]
    weight, softcap = draw(5000, 256, seed=1), 29.5  # no other test has it: what it compiles is not there yet

    def head(rows: int, count: int, skipped: int) -> None:
        at = torch.zeros(count + skipped, dtype=torch.int64, device="cuda")[skipped:]
        lm_head_logprobs(draw(rows, 256, seed=2), weight, at, at, softcap, RULE)

    with compilations() as found:
        for one in operands:
            one.product(0, 48)
        head(48, 48, 0)
    assert len(found) == 6
    with compilations() as found:
        for count in (1, 2, 15, 16, 17, 31, 1000, 1024, MOST):
            for one in operands:
                one.product(0, count)
        for rows, count, skipped in ((1, 1, 0), (2, 16, 1), (16, 5, 3), (17, 1000, 0), (4097, 3, 1)):
            head(rows, count, skipped)
    assert found == []


PARTS, IN = (512, 256, 256), 768


def values(rows: int, seed: int) -> Tensor:
    """float32 [rows, IN] of very different sizes, one row of zeros."""
    source = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-6, 2, rows)[torch.randperm(rows, generator=source)]
    sizes[3] = 0.0
    return torch.randn(rows, IN, generator=source) * sizes[:, None]


def weights() -> Tensor:
    """One row is subnormal."""
    out = values(sum(PARTS), seed=1)
    out[5] = 1e-41
    return out


def blocks(rows: Tensor) -> Blocks:
    return lambda: ((first, rows[first : first + 100]) for first in range(0, len(rows), 100))


def filled(scheme: str, device: str) -> QuantLinear:
    with torch.device(device):
        module = make_linear(scheme, IN, PARTS)
    for part, rows in enumerate(weights().split(PARTS)):
        module.put(part, blocks(rows.to(device)))
    if isinstance(module, Fp8Linear) and module.static:
        module.input_scales.fill_(0.0625)
        module.share_input()
    module.loaded()
    return module


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_get_the_same_codes_as_on_the_cpu(scheme: str) -> None:
    here, there = filled(scheme, "cuda"), filled(scheme, "cpu")
    assert torch.equal(here.weight.cpu().view(torch.uint8), there.weight.view(torch.uint8))
    assert torch.equal(here.weight_scale.cpu(), there.weight_scale)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_linear_is_its_scheme(scheme: str) -> None:
    """From float32 inputs and weights to what the consumer sees, against the scheme's definition in float64.

    Off by one rounding to bf16 and by what sums of 14 bits lose of e4m3 products: 2^-8 of a row's root mean square is
    six standard deviations of it.
    """
    module, x = filled(scheme, "cuda"), values(70, seed=2)
    kind = module.encoding.kind
    given: Activation = x.cuda().bfloat16()
    if kind != "float":
        rounded, scale = module.quantize_input(x.cuda(), 0)
        given = Codes(rounded.to(module.encoding.dtype), scale.reshape(-1))
    out = module(given, RULE).float()
    if module.pending is not None:
        out *= module.pending.repeat_interleave(torch.tensor(PARTS, device="cuda"))
    assert (module.pending is not None) == (scheme in ("fp8s", "fp8"))
    fixed = torch.full((3,), 0.0625) if scheme == "fp8s" else None
    expected = reference.linear(scheme, x, weights(), PARTS, fixed)
    norms = expected.norm(dim=1, keepdim=True) / expected.shape[1] ** 0.5
    assert ((out.cpu() - expected).abs() <= 2**-8 * expected.abs() + 2**-8 * norms).all()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("checkpoint", ["tiny_checkpoint", "tiny_gemma4"])
def test_a_checkpoint_loads_to_the_same_bits(request: pytest.FixtureRequest, checkpoint: str, scheme: str) -> None:
    """But for what a GPU alone reads: scales of inputs, and those that its products leave pending."""
    snapshot: Path = request.getfixturevalue(checkpoint)
    own = ("input_scales", "pending", "output_scale")
    found = []
    for device in ("cuda", "cpu"):
        with torch.device(device):
            model = GemmaModel(model_config(snapshot), torch.bfloat16)
            use_scheme(model, scheme)
        load_weights(model, snapshot)
        found.append(dict(model.named_parameters()) | {n: b for n, b in model.named_buffers() if not n.endswith(own)})
    assert found[0].keys() == found[1].keys()
    for name, here in found[0].items():
        assert here.is_cuda, name
        assert torch.equal(here.cpu().view(torch.uint8), found[1][name].view(torch.uint8)), name


VOCAB, WIDTH = 262_144, 3840


@pytest.fixture(scope="module")
def head() -> Iterator[Callable[..., Tensor]]:
    """The head of the 12B: logits of standard deviation 3."""
    weight = draw(VOCAB, WIDTH, seed=1).mul_(3 / WIDTH**0.5)

    def run(x: Tensor, rows: Tensor, cols: Tensor, softcap: float | None = 30.0) -> Tensor:
        return lm_head_logprobs(x, weight, rows, cols, softcap, RULE)

    run.weight = weight  # type: ignore[attr-defined]
    yield run
    torch.cuda.empty_cache()


def exact_logprobs(x: Tensor, weight: Tensor, softcap: float | None) -> Tensor:
    """[R, V] float64, from x in bf16."""
    logits = torch.cat([x.bfloat16().double() @ part.double().t() for part in weight.split(16_384)], dim=1)
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return torch.log_softmax(logits, dim=1)


@pytest.mark.parametrize("softcap", [None, 30.0], ids=str)
def test_head(head: Any, softcap: float | None) -> None:
    """Off by what 240 additions of the tensor cores, which cut instead of rounding, take from a logit of at most 16."""
    x = draw(8, WIDTH, seed=2).float()
    expected = exact_logprobs(x, head.weight, softcap)
    rows = torch.arange(8, device="cuda").repeat_interleave(2000)
    cols = torch.cat([some(2000, VOCAB, seed) for seed in range(8)])
    ours = head(x, rows, cols, softcap)
    off = (ours.double() - expected[rows, cols]).abs().max()
    assert off < 240 * 2**-23 * 16, off


@pytest.mark.parametrize("softcap", [None, 30.0], ids=str)
def test_the_whole_vocabulary_has_probability_one(head: Any, softcap: float | None) -> None:
    x = draw(3, WIDTH, seed=3).float() * torch.tensor([[0.1], [1.0], [4.0]], device="cuda")
    rows, cols = (t.reshape(-1).cuda() for t in torch.meshgrid(torch.arange(3), torch.arange(VOCAB), indexing="ij"))
    total = head(x, rows.contiguous(), cols.contiguous(), softcap).double().exp().view(3, VOCAB).sum(1)
    assert (total - 1).abs().max() < 1e-5, total - 1


def test_a_row_of_the_head_keeps_its_bits(head: Any) -> None:
    x = draw(3000, WIDTH, seed=4).float()
    rows, cols = torch.arange(3000, device="cuda").repeat_interleave(3), some(9000, VOCAB, 5)
    whole = head(x, rows, cols)
    changed = []
    for count in (*range(1, 65), 127, 128, 129, 500, 1000, 2047, 2048, 2049):
        if not torch.equal(head(x[:count], rows[: 3 * count], cols[: 3 * count]), whole[: 3 * count]):
            changed.append(count)
    assert not changed
    for first, count in ((5, 1), (100, 300), (2040, 33)):
        here = slice(3 * first, 3 * (first + count))
        part = head(x[first : first + count], rows[: 3 * count].flip(0), cols[here].flip(0))
        assert torch.equal(part.flip(0), whole[here]), (first, count)
