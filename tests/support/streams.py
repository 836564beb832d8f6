"""Checks of the kernels that stream activations, for the interpreter's tests and the GPU's.

A kernel computes y in float32 and rounds it once, to a code. Of y we know what float64 gives and, from the roundings on
its way, how far float32 may be off: u = 2^-24 for each operation. Rounding is monotone, so the code must lie between
those of the two ends: it is THE code unless y is within that error of a tie, and `MOST_NEAR_TIES` bounds how many are.
The scale of a row is bounded in the same way; its codes are then checked against the scale that the kernel wrote.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from workers.engine.kernels.encode import reference as encode_reference
from workers.engine.kernels.encoding import Activation, Codes, Encoding
from workers.engine.kernels.gelu_mul import reference as gelu_reference
from workers.engine.kernels.rms_norm import reference as norm_reference
from workers.engine.kernels.rotary import HeadLayout, rotary_table
from workers.engine.kernels.rotary import reference as rotary_reference
from workers.engine.quant import rounding

U = 2.0**-24
NORM = (40 / 2 + 6) * U
"""Relative error of x · (1 / √(mean(x²) + eps)) · scale.

A term of the sum of squares, all positive, passes at most 40 roundings (its square, up to 16 numbers of a thread one
after the other, a tree over 512 threads; under the interpreter numpy's pairwise sum). The root halves them. Then there
are the division by K (halved too), the epsilon (likewise), the root, the reciprocal and two products: 25.5, and second
order.
"""
EXP2 = 2.0**-22
"""Relative error of the card's 2^x (PTX ISA, ex2.approx)."""
MOST_NEAR_TIES = 0.01

EPS = 1e-6
ENCODINGS = {
    "bf16": Encoding("float", torch.bfloat16),
    "float32": Encoding("float", torch.float32),
    "static": Encoding("fp8_static", torch.bfloat16, torch.tensor([2.0**-8])),
    "static-odd": Encoding("fp8_static", torch.bfloat16, torch.tensor([0.005])),
    "stream": Encoding("fp8_stream", torch.bfloat16),
    "row": Encoding("fp8_row", torch.bfloat16),
    "int8": Encoding("int8_row", torch.bfloat16),
}
"""The fixed scales are small enough that some values lie beyond the last code."""
ROW_WISE = [name for name in ENCODINGS if name != "stream"]

Op = Callable[..., Sequence[Tensor]]
"""Rows in, rows out: the bits of each row depend on that row alone."""


def encoding(name: str, device: str = "cpu") -> Encoding:
    plain = ENCODINGS[name]
    return plain if plain.scale is None else Encoding(plain.kind, plain.dtype, plain.scale.to(device))


def draw(*shape: int, seed: int = 0, device: str = "cpu") -> Tensor:
    """Normal numbers."""
    return torch.randn(*shape, generator=torch.Generator(device).manual_seed(seed), device=device)


def draw_rows(rows: int, width: int, seed: int = 0, device: str = "cpu") -> Tensor:
    """Rows of very different sizes, every fourth from the third on of zeros as padding may be, with outliers."""
    x = draw(rows, width, seed=seed, device=device) * draw(rows, 1, seed=seed + 100, device=device).mul(2).exp()
    x[:, width // 3] *= 20
    x[2::4] = 0
    return x


def draw_gates(rows: int, width: int, device: str = "cpu") -> Tensor:
    """gate and up [T, 2·width] bf16 where gelu is neither zero nor its argument; every fourth row is zero."""
    x = draw(rows, 2 * width, device=device) * 2
    x[2::4] = 0
    return x.bfloat16()


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def exact(y: Tensor, wanted: Encoding) -> Activation:
    """As the CPU's linears quantize their inputs, with the functions of `quant.rounding`."""
    if wanted.kind == "float":
        return y.to(wanted.dtype)
    y = y.float()
    largest = rounding.INT8_MAX if wanted.kind == "int8_row" else rounding.E4M3_MAX
    amax = y.abs().amax().view(1) if wanted.kind == "fp8_stream" else y.abs().amax(dim=1)
    scale = wanted.scale if wanted.kind == "fp8_static" else rounding.scale_for(amax, largest)
    assert scale is not None
    quotient = y / scale[:, None]
    return Codes(rounding.to_int8(quotient) if wanted.kind == "int8_row" else rounding.to_e4m3(quotient), scale)


def same(ours: Activation, theirs: Activation) -> bool:
    """Equal bits; of NaN that both are, for its sign and payload belong to the machine."""
    if isinstance(ours, Codes):
        assert isinstance(theirs, Codes)
        return same(ours.values, theirs.values) and same(ours.scale, theirs.scale)
    assert isinstance(theirs, Tensor)
    nan = ours.float().isnan()
    bits = (x.view(torch.uint8).view(*x.shape, -1).masked_fill(nan[..., None], 0) for x in (ours, theirs))
    return ours.dtype == theirs.dtype and torch.equal(nan, theirs.float().isnan()) and torch.equal(*bits)


def ties(wanted: Encoding, rows: int, width: int) -> Tensor:
    """Rows of numbers whose quotients lie at or next to a tie between two codes; the first one sets a scale of 0.005.

    A quotient that is not rounded as it should be ends on the other side of some of these ties.
    """
    if wanted.kind == "int8_row":
        codes = torch.arange(128.0)
    else:
        codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    step = 0.005 if wanted.scale is None else float(wanted.scale)
    y = (codes[1:] + codes[:-1]) / 2 * step
    y = (y.view(torch.int32)[:, None] + torch.arange(-1, 2, dtype=torch.int32)).view(torch.float32).flatten()
    y = torch.cat([y, -y])
    filled = y[torch.arange(rows * width) * 7 % len(y)].view(rows, width).clone()
    filled[:, 0] = codes[-1] * step
    return filled


def far_out() -> list[Tensor]:
    """y with rows too small for a normal scale, of infinities and of NaN: as a whole, and parts without NaN."""
    y = torch.zeros(6, 20)
    y[0, 3], y[1, 4], y[2, 5], y[3, 6], y[4, 7] = 1e-40, 1e-37, 3e38, float("inf"), float("nan")
    y[2:, 0] = 1e-3
    return [y, y[:2].clone(), y[2:3].clone()]


def row_tensors(result: Activation, wanted: Encoding) -> tuple[Tensor, ...]:
    """What of a result belongs to its rows."""
    if not isinstance(result, Codes):
        return (result,)
    return (result.values,) if wanted.kind == "fp8_static" else (result.values, result.scale)


def check_encoded(result: Activation, y: Tensor, error: Tensor, wanted: Encoding) -> None:
    """y, error [T, K] float64: each float32 y of the kernel is within `error`."""
    low, high = (y - error).float(), (y + error).float()
    if wanted.kind == "float":
        assert isinstance(result, Tensor)
        got, ends = result, (low.to(wanted.dtype), high.to(wanted.dtype))
        assert got.dtype == wanted.dtype
    else:
        assert isinstance(result, Codes)
        got = result.values
        assert got.dtype == (torch.int8 if wanted.kind == "int8_row" else torch.float8_e4m3fn)
        _check_scale(result.scale, y, error, wanted)
        ends = tuple(encode_reference.codes(end, result.scale, wanted.kind) for end in (low, high))
    low, got, high = ends[0].float(), got.float(), ends[1].float()
    assert got.shape == y.shape
    assert ((low <= got) & (got <= high)).all()
    if wanted.dtype != torch.float32:
        assert (low != high).sum() <= 1 + MOST_NEAR_TIES * low.numel()


def _check_scale(scale: Tensor, y: Tensor, error: Tensor, wanted: Encoding) -> None:
    if wanted.kind == "fp8_static":
        assert scale is wanted.scale
        return
    assert scale.dtype == torch.float32
    size = y.abs()
    least, most = (encode_reference.scale(end, wanted.kind) for end in ((size - error).clamp(min=0), size + error))
    assert scale.shape == least.shape
    assert ((least <= scale) & (scale <= most)).all()


def check_norm(op: Callable[..., Activation], x: Tensor, scale: Tensor, wanted: Encoding) -> None:
    y = norm_reference.rms_norm(x.double(), scale.double(), EPS)
    check_encoded(op(x, scale, EPS, wanted), y, y.abs() * NORM, wanted)


def check_residual(
    op: Callable[..., Activation],
    x: Tensor,
    h: Tensor,
    post: Tensor,
    scalar: Tensor | None,
    scale: Tensor,
    wanted: Encoding,
) -> None:
    """The new x against the formula; then the codes against the norm of the very x that was written."""
    wide = [None if part is None else part.double() for part in (h, post, scalar)]
    expected, _ = norm_reference.residual_norm(x.double(), *wide, scale.double(), EPS)  # type: ignore[arg-type]
    factor = 1.0 if scalar is None else scalar.double().abs()
    added = (norm_reference.rms_norm(h.double(), post.double(), EPS) * factor).abs()
    ours = x.clone()
    result = op(ours, h, post, scalar, scale, EPS, wanted)
    assert ((ours.double() - expected).abs() <= added * NORM + expected.abs() * 2 * U).all()
    y = norm_reference.rms_norm(ours.double(), scale.double(), EPS)
    check_encoded(result, y, y.abs() * NORM, wanted)


def check_gelu(op: Callable[..., Activation], gate_up: Tensor, pending: Tensor | None, wanted: Encoding) -> None:
    """v = gate · (C1 + C3 · gate²) carries 8 roundings at most, both terms having one sign; then come 2^v, and 8 more.

    Beyond the range of float32 2^v is infinite and y zero.
    """
    wide = None if pending is None else pending.double()
    gate, up = gate_up.double().chunk(2, dim=1)
    if wide is not None:
        gate, up = gate * wide[0], up * wide[1]
    v = -2 * math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    y = gate * torch.sigmoid(-v) * up
    # The reference is the same function, but for what 1 + tanh cancels.
    assert ((y - gelu_reference.gelu_mul(gate_up.double(), wide)).abs() <= (gate * up).abs() * 2.0**-50).all()
    of_exp = torch.sigmoid(v) * (8 * U * v.abs() + EXP2)
    floor = (gate * up).abs() * 2.0**-124
    check_encoded(op(gate_up, wanted, pending), y, y.abs() * (of_exp + 8 * U) + floor, wanted)


def check_rotary(op: Callable[..., Sequence[Tensor]], rows: int, layout: HeadLayout, norm_v: bool, left: bool) -> None:
    """`left`: scales are pending. Rows that the op leaves to its caller stay NaN, as fresh memory is in tests.

    A rotated number is a difference of two products of normed numbers.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    d, extra = layout.head_dim, 3
    qkv = draw_rows(rows, layout.width, device=device).bfloat16()
    pending = torch.tensor([0.3678794, 2.7182817, 0.0115129], device=device)[: len(layout.parts)] if left else None
    q_scale, k_scale = draw(d, seed=1, device=device), draw(d, seed=2, device=device)
    cos, sin = angles(rows, d, device)
    ours = op(qkv, layout, q_scale, k_scale, cos, sin, EPS, norm_v=norm_v, pending=pending, extra_rows=extra)
    wide = qkv.double() if pending is None else rotary_reference.scaled(qkv.double(), layout, pending.double())

    def reference(x: Tensor, c: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads = rotary_reference.qkv_norm_rotary(x, layout, q_scale.double(), k_scale.double(), c, s, EPS, norm_v)
        return rotary_reference.rows_of(layout, *heads)

    expected = reference(wide, cos.double(), sin.double())
    # |first · cos| + |second · sin| and its like: both reference terms with the signs taken away
    parts = [reference(wide, a.double(), b.double()) for a, b in ((cos, sin * 0), (cos * 0, sin))]
    for name, got, y, of_cos, of_sin in zip("qkv", ours, expected, *parts, strict=True):
        size = y.abs() if name == "v" else of_cos.abs() + of_sin.abs()
        error = size * ((NORM + 5 * U) if name != "v" or norm_v else U * (pending is not None))
        assert got.is_contiguous()
        assert got.shape == (rows + extra * (name != "q"), *y.shape[1:])
        assert got[rows:].isnan().all()
        check_encoded(got[:rows].flatten(1), y.flatten(1), error.flatten(1), ENCODINGS["bf16"])


def angles(rows: int, d: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """cos, sin [T, D/2] of positions with gaps."""
    frequencies = 10_000.0 ** -(torch.arange(0, d, 2, device=device) / d)
    return rotary_table(torch.arange(rows, device=device) * 7, frequencies)


def check_rows(op: Op, inputs: Sequence[Tensor], pieces: Sequence[tuple[int, int]]) -> None:
    """Rows first … first + count of the inputs [T, ...] alone give the bits that they give among all T."""
    whole = op(*inputs)
    for first, count in pieces:
        part = op(*(x[first : first + count].contiguous() for x in inputs))
        for alone, among in zip(part, whole, strict=True):
            assert same_bits(alone, among[first : first + count]), (first, count)
