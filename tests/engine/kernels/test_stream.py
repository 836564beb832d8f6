"""The kernels that stream activations, under the interpreter: small and awkward shapes against the references."""

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
from tests.support.triton_interpreter import has_device
from workers.engine.kernels.encode import kernel as encode_kernel
from workers.engine.kernels.encode import reference as encode_reference
from workers.engine.kernels.encoding import Encoding
from workers.engine.kernels.gelu_mul import kernel as gelu_kernel
from workers.engine.kernels.rms_norm import kernel as norm_kernel
from workers.engine.kernels.rotary import HeadLayout
from workers.engine.kernels.rotary import kernel as rotary_kernel
from workers.engine.quant import rounding

pytestmark = pytest.mark.skipif(has_device(), reason="kernels run on the device, not interpreted")

SHAPES = [(1, 96), (3, 20), (5, 640)]


@pytest.mark.parametrize(("rows", "width"), SHAPES)
@pytest.mark.parametrize("name", ENCODINGS)
def test_norm_encode(name: str, rows: int, width: int) -> None:
    check_norm(norm_kernel.norm_encode, draw_rows(rows, width), draw(width, seed=1), encoding(name))


def test_norm_without_a_scale_and_of_bf16() -> None:
    x = draw_rows(3, 20).bfloat16()
    ours = norm_kernel.norm_encode(x, None, EPS, encoding("float32"))
    assert same_bits(ours, norm_kernel.norm_encode(x.float(), torch.ones(20), EPS, encoding("float32")))


@pytest.mark.parametrize("scalar", [None, 0.37], ids=["plain", "layer-scalar"])
@pytest.mark.parametrize(("rows", "width"), SHAPES)
@pytest.mark.parametrize("name", ENCODINGS)
def test_residual_norm(name: str, rows: int, width: int, scalar: float | None) -> None:
    x, h = draw_rows(rows, width), draw_rows(rows, width, seed=1).bfloat16()
    factor = None if scalar is None else torch.tensor([scalar])
    post, scale = draw(width, seed=2), draw(width, seed=3)
    check_residual(norm_kernel.residual_norm, x, h, post, factor, scale, encoding(name))


@pytest.mark.parametrize("name", ["bf16", "static", "row"])
def test_residual_norm_of_a_bf16_stream(name: str) -> None:
    """The stream is rounded when it is written, and the norm is that of what was written."""
    x, h, post, scale = draw(5, 96).bfloat16(), draw(5, 96, seed=1).bfloat16(), draw(96, seed=2), draw(96, seed=3)
    factor = torch.tensor([0.7])
    wide = x.float()
    norm_kernel.residual_norm(wide, h, post, factor, scale, EPS, encoding(name))
    ours = norm_kernel.residual_norm(x, h, post, factor, scale, EPS, encoding(name))
    assert torch.equal(x, wide.bfloat16())
    expected = norm_kernel.norm_encode(x, scale, EPS, encoding(name))
    for mine, theirs in zip(row_tensors(ours, encoding(name)), row_tensors(expected, encoding(name)), strict=True):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("pending", [None, (0.37, 0.11)], ids=["plain", "pending"])
@pytest.mark.parametrize(("rows", "width"), [(1, 96), (3, 20), (5, 1100)])
@pytest.mark.parametrize("name", ENCODINGS)
def test_gelu_mul_encode(name: str, rows: int, width: int, pending: tuple[float, float] | None) -> None:
    """1100 columns are two tiles, the second one ragged."""
    gate_up = draw_gates(rows, width)
    left = None if pending is None else torch.tensor(pending)
    check_gelu(gelu_kernel.gelu_mul_encode, gate_up, left, encoding(name))


def test_gelu_mul_far_out() -> None:
    """Where the exponential overflows the value is zero, and large inputs pass through."""
    gate = torch.tensor([-1e30, -1e4, -60.0, -12.0, -5.0, 0.0, 12.0, 1e4, 1e30])
    check_gelu(gelu_kernel.gelu_mul_encode, torch.cat([gate, gate * 0 + 2.0])[None], None, encoding("float32"))


LAYOUTS = [
    HeadLayout(4, 2, 16),
    HeadLayout(3, 1, 48),
    HeadLayout(6, 6, 64),
    HeadLayout(5, 1, 256, shared_kv=True),
    HeadLayout(20, 20, 80, shared_kv=True),
]


@pytest.mark.parametrize("left", [False, True], ids=["plain", "pending"])
@pytest.mark.parametrize("norm_v", [False, True], ids=["plain-v", "norm-v"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_qkv_norm_rotary(rows: int, layout: HeadLayout, norm_v: bool, left: bool) -> None:
    """20 heads of 80 are two programs, the second one ragged."""

    def op(*arguments: Any, norm_v: bool, pending: Tensor | None, extra_rows: int) -> tuple[Tensor, Tensor, Tensor]:
        return rotary_kernel.qkv_norm_rotary(*arguments, norm_v, pending, extra_rows)

    check_rotary(op, rows, layout, norm_v, left)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
@pytest.mark.parametrize("name", ENCODINGS)
def test_encode_has_the_bits_of_the_rounding_rules(name: str, rows: int, width: int, dtype: torch.dtype) -> None:
    wanted = encoding(name)
    for y in (draw_rows(rows, width), ties(wanted, rows, width)):
        y = y.to(dtype)
        theirs = exact(y, wanted)
        assert same(encode_kernel.encode(y, wanted), theirs)
        assert same(encode_reference.encode(y, wanted), theirs)


@pytest.mark.parametrize("name", ["static", "static-odd", "stream", "row"])
def test_encode_far_out(name: str) -> None:
    """Rows too small for a normal scale, of infinities and of NaN: the code and the scale of each say so."""
    for y in far_out():
        assert same(encode_kernel.encode(y, encoding(name)), exact(y, encoding(name)))


def test_scales_in_the_middle_of_a_tensor() -> None:
    """Powers of two, and numbers of few bits that are none."""
    scales = torch.tensor([1.0, 2.0**-8, 0.005, 1.5 * 2**-8, 2.0**-126])
    for i in range(len(scales)):
        wanted = Encoding("fp8_static", torch.bfloat16, scales[i : i + 1])
        y = ties(wanted, 3, 300)
        assert same(encode_kernel.encode(y, wanted), exact(y, wanted))


def test_the_scale_of_a_long_stream() -> None:
    """More rows than are looked at in one step, the largest number in the last row."""
    amax, scale = torch.arange(11.0), torch.empty(1)
    encode_kernel._stream_scale_kernel[(1,)](amax, scale, 11, 4)
    assert same_bits(scale, rounding.scale_for(torch.tensor([10.0]), rounding.E4M3_MAX))


PIECES = [(0, 1), (5, 3), (16, 1)]


@pytest.mark.parametrize("name", ROW_WISE)
def test_rows_do_not_depend_on_other_rows(name: str) -> None:
    wanted, rows, width = encoding(name), 17, 96
    x, h = draw_rows(rows, width), draw_rows(rows, width, seed=1).bfloat16()
    post, scale, pending = draw(width, seed=2), draw(width, seed=3), torch.tensor([0.5, 0.3])

    def residual(x: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        ours = x.clone()
        return (*row_tensors(norm_kernel.residual_norm(ours, h, post, None, scale, EPS, wanted), wanted), ours)

    check_rows(lambda x: row_tensors(norm_kernel.norm_encode(x, scale, EPS, wanted), wanted), [x], PIECES)
    check_rows(residual, [x, h], PIECES)
    check_rows(lambda h: row_tensors(gelu_kernel.gelu_mul_encode(h, wanted, pending), wanted), [h], PIECES)
    check_rows(lambda x: row_tensors(encode_kernel.encode(x, wanted), wanted), [x], PIECES)


def test_heads_do_not_depend_on_other_rows() -> None:
    layout = HeadLayout(4, 2, 16)
    cos, sin = angles(17, 16)

    def op(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        scales = draw(16, seed=1), draw(16, seed=2)
        return rotary_kernel.qkv_norm_rotary(qkv, layout, *scales, cos, sin, EPS, True, None, 0)

    check_rows(op, [draw_rows(17, layout.width).bfloat16(), cos, sin], PIECES)
