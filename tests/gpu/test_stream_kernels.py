"""The kernels that stream activations on the card, at the shapes of the 12B and the 31B."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.streams import (
    ENCODINGS,
    EPS,
    ROW_WISE,
    angles,
    check_gelu,
    check_norm,
    check_residual,
    check_rotary,
    check_rows,
    draw,
    draw_gates,
    draw_rows,
    encoding,
    exact,
    far_out,
    row_tensors,
    same,
    same_bits,
    ties,
)
from workers.engine.kernels.embedding import embedding
from workers.engine.kernels.encode import encode
from workers.engine.kernels.encoding import Activation, Codes, Encoding
from workers.engine.kernels.gelu_mul import gelu_mul_encode
from workers.engine.kernels.rms_norm import norm_encode, residual_norm, rms_norm
from workers.engine.kernels.rotary import HeadLayout, qkv_norm_rotary, rotary_table

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU"),
    pytest.mark.usefixtures("fresh_memory_is_nan"),
]

DEVICE = "cuda"
ROWS = [1, 63, 1000, 16_384]
WIDTHS = [3840, 5376]
INNER = [15_360, 21_504]
LAYOUTS = [
    HeadLayout(16, 8, 256),
    HeadLayout(16, 1, 512, shared_kv=True),
    HeadLayout(32, 16, 256),
    HeadLayout(32, 4, 512, shared_kv=True),
]
"""Sliding and full layers of the 12B, then of the 31B."""
PIECES = [(0, 1), (0, 2), (1, 1), (2, 15), (16, 16), (5, 17), (37, 900), (999, 1)]
LATE_PIECES = [(16_383, 1), (8191, 64), (3, 1000)]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ENCODINGS)
def test_norm_encode(name: str, width: int, rows: int) -> None:
    x = draw_rows(rows, width, device=DEVICE)
    check_norm(norm_encode, x, draw(width, seed=1, device=DEVICE), encoding(name, DEVICE))


@pytest.mark.parametrize("scalar", [None, 0.37], ids=["plain", "layer-scalar"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ENCODINGS)
def test_residual_norm(name: str, width: int, rows: int, scalar: float | None) -> None:
    x, h = draw_rows(rows, width, device=DEVICE), draw_rows(rows, width, seed=1, device=DEVICE).bfloat16()
    factor = None if scalar is None else torch.tensor([scalar], device=DEVICE)
    post, scale = draw(width, seed=2, device=DEVICE), draw(width, seed=3, device=DEVICE)
    check_residual(residual_norm, x, h, post, factor, scale, encoding(name, DEVICE))


@pytest.mark.parametrize("pending", [None, (0.37, 0.11)], ids=["plain", "pending"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", INNER)
@pytest.mark.parametrize("name", ENCODINGS)
def test_gelu_mul_encode(name: str, width: int, rows: int, pending: tuple[float, float] | None) -> None:
    left = None if pending is None else torch.tensor(pending, device=DEVICE)
    check_gelu(gelu_mul_encode, draw_gates(rows, width, device=DEVICE), left, encoding(name, DEVICE))


def test_gelu_mul_far_out() -> None:
    """Where the exponential overflows the value is zero, and large inputs pass through."""
    gate = torch.tensor([-1e30, -1e4, -60.0, -12.0, -5.0, 0.0, 12.0, 1e4, 1e30], device=DEVICE)
    gate_up = torch.cat([gate, gate * 0 + 2.0])[None]
    check_gelu(gelu_mul_encode, gate_up, None, encoding("float32"))


@pytest.mark.parametrize("left", [False, True], ids=["plain", "pending"])
@pytest.mark.parametrize("norm_v", [False, True], ids=["plain-v", "norm-v"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("layout", [*LAYOUTS, HeadLayout(4, 1, 80), HeadLayout(8, 2, 64)], ids=str)
def test_qkv_norm_rotary(layout: HeadLayout, rows: int, norm_v: bool, left: bool) -> None:
    check_rotary(qkv_norm_rotary, rows, layout, norm_v, left)


def _moved(activation: Activation) -> Activation:
    return Codes(activation.values.cpu(), activation.scale.cpu()) if isinstance(activation, Codes) else activation.cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [4096, 5376, 8192, 16_384])
@pytest.mark.parametrize("name", ENCODINGS)
def test_encode_has_the_bits_of_the_rounding_rules(name: str, width: int, dtype: torch.dtype) -> None:
    """As the CPU quantizes, bit for bit."""
    for y in (draw_rows(63, width), ties(encoding(name), 3, width)):
        ours = encode(y.to(dtype).to(DEVICE), encoding(name, DEVICE))
        assert same(_moved(ours), exact(y.to(dtype), encoding(name)))


@pytest.mark.parametrize("name", ["static", "static-odd", "stream", "row"])
def test_encode_far_out(name: str) -> None:
    """Rows too small for a normal scale, of infinities and of NaN: the code and the scale of each say so."""
    for y in far_out():
        assert same(_moved(encode(y.to(DEVICE), encoding(name, DEVICE))), exact(y, encoding(name)))


def _row_ops(width: int, inner: int, wanted: Encoding) -> dict[str, tuple[Callable[..., Any], list[int]]]:
    """Name → (op, widths of its inputs). The second input of residual_norm, and gelu's, become bf16."""
    post, scale = draw(width, seed=2, device=DEVICE), draw(width, seed=3, device=DEVICE)
    factor, pending = torch.tensor([0.7], device=DEVICE), torch.tensor([0.5, 0.3], device=DEVICE)

    def residual(x: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        ours = x.clone()
        return (*row_tensors(residual_norm(ours, h.bfloat16(), post, factor, scale, EPS, wanted), wanted), ours)

    return {
        "norm": (lambda x: row_tensors(norm_encode(x, scale, EPS, wanted), wanted), [width]),
        "residual": (residual, [width, width]),
        "gelu": (lambda x: row_tensors(gelu_mul_encode(x.bfloat16(), wanted, pending), wanted), [2 * inner]),
        "encode": (lambda x: row_tensors(encode(x, wanted), wanted), [width]),
    }


@pytest.mark.parametrize(("width", "inner"), list(zip(WIDTHS, INNER, strict=True)), ids=["12b", "31b"])
@pytest.mark.parametrize("name", ROW_WISE)
def test_rows_do_not_depend_on_other_rows(name: str, width: int, inner: int) -> None:
    """Among 1,000 and among 16,384 rows: any number of them, from any offset on."""
    for op, widths in _row_ops(width, inner, encoding(name, DEVICE)).values():
        for rows, pieces in ((1000, PIECES), (16_384, LATE_PIECES)):
            check_rows(op, [draw_rows(rows, w, seed=i, device=DEVICE) for i, w in enumerate(widths)], pieces)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_heads_do_not_depend_on_other_rows(layout: HeadLayout) -> None:
    scales = draw(layout.head_dim, seed=1, device=DEVICE), draw(layout.head_dim, seed=2, device=DEVICE)

    def op(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        return qkv_norm_rotary(qkv, layout, *scales, cos, sin, EPS, norm_v=True)

    for rows, pieces in ((1000, PIECES), (16_384, LATE_PIECES)):
        qkv = draw_rows(rows, layout.width, device=DEVICE).bfloat16()
        check_rows(op, [qkv, *angles(rows, layout.head_dim, DEVICE)], pieces)


def test_no_row_count_compiles_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every encoding, scales in the middle of a tensor included: what ran once for one row count has run for all."""
    from triton import knobs

    heard: list[str] = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda **event: heard.append(event["src"].name))
    scales = torch.tensor([1.0, 2.0**-8, 0.005], device=DEVICE)
    fixed = [Encoding("fp8_static", torch.bfloat16, scales[i : i + 1]) for i in range(3)]
    for rows in (64, 1, 2, 15, 16, 17, 1000, 16_384):
        for wanted in [*(encoding(name, DEVICE) for name in ENCODINGS), *fixed]:
            for op, widths in _row_ops(3840, 15_360, wanted).values():
                op(*(draw(rows, w, device=DEVICE) for w in widths))
        for layout in LAYOUTS:
            check_rotary(qkv_norm_rotary, rows, layout, True, True)
        if rows == 64:
            heard.clear()
        assert not heard, (rows, heard)


def test_rms_norm_takes_any_shape() -> None:
    x, scale = draw(7, 5, 256, device=DEVICE), draw(256, seed=1, device=DEVICE)
    rows = norm_encode(x.view(35, 256), scale, EPS, encoding("float32"))
    assert isinstance(rows, Tensor)
    assert same_bits(rms_norm(x, scale, EPS), rows.view(7, 5, 256))


def test_the_table_of_angles() -> None:
    """Products as on the CPU; cosine and sine to two float32 roundings of 1, far out too, and row by row alike."""
    positions = torch.cat([torch.arange(1000), torch.tensor([65_535, 131_071])])
    frequencies = 1e6 ** -(torch.arange(0, 512, 2) / 512)
    ours = rotary_table(positions.to(DEVICE), frequencies.to(DEVICE))
    angle = (positions.float()[:, None] * frequencies).double()
    for got, wanted in zip(ours, (angle.cos(), angle.sin()), strict=True):
        assert (got.cpu().double() - wanted).abs().max() <= 2.0**-23
    check_rows(lambda p: rotary_table(p, frequencies.to(DEVICE)), [positions.to(DEVICE)], PIECES)


def test_embedding() -> None:
    weight = draw(1000, 3840).bfloat16()
    tokens = torch.randint(0, 1000, (333,), generator=torch.Generator().manual_seed(1))
    ours = embedding(tokens.to(DEVICE), weight.to(DEVICE), 3840**0.5)
    assert same_bits(ours.cpu(), embedding(tokens, weight, 3840**0.5))
