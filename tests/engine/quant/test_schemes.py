"""Every scheme's linear against the reference, its parts, and whether its rows keep their bits."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from workers.engine.kernels.products import RowRule
from workers.engine.quant import SCHEMES, Fp8Linear, QuantLinear, fp8, fp8row, make_linear, reference, w8a8, w8a16
from workers.engine.quant.linear import Blocks

RULE = RowRule()
IN, PARTS = 77, (24, 7, 33)
INPUT_SCALES = torch.tensor([0.03125, 0.0625, 0.015625])
RELATIVE = 2e-6  # sums of 77 products in float32 against float64, over the largest output


def in_blocks(rows: Tensor, step: int) -> Blocks:
    """A weight as the loader hands it over: a few rows at a time, in a buffer that is used again."""

    def blocks() -> Iterator[tuple[int, Tensor]]:
        buffer = torch.empty(step, rows.shape[1], dtype=rows.dtype)
        for first in range(0, len(rows), step):
            count = min(step, len(rows) - first)
            buffer[:count] = rows[first : first + count]
            yield first, buffer[:count]

    return blocks


def weight() -> Tensor:
    """Rows of very different size; one row and the whole second part are zero."""
    w = torch.randn(sum(PARTS), IN, generator=torch.Generator().manual_seed(4))
    w *= torch.logspace(-3, 1, sum(PARTS))[torch.randperm(sum(PARTS), generator=torch.Generator().manual_seed(5)), None]
    w[3] = 0
    w[PARTS[0] : PARTS[0] + PARTS[1]] = 0
    return w


def inputs(rows: int) -> Tensor:
    x = torch.randn(rows, IN, generator=torch.Generator().manual_seed(rows))
    x *= torch.logspace(-2, 1, rows)[:, None]
    if rows > 1:
        x[rows // 2] = 0
    return x


def filled(scheme: str, w: Tensor, step: int = 5) -> QuantLinear:
    linear = make_linear(scheme, IN, PARTS)
    for part, rows in enumerate(torch.split(w, PARTS)):
        linear.put(part, in_blocks(rows, step))
    if isinstance(linear, Fp8Linear) and linear.static:
        linear.input_scales.copy_(INPUT_SCALES)
    return linear


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("rows", [1, 63, 64, 200])
def test_linear_is_the_reference(scheme: str, rows: int) -> None:
    w, x = weight(), inputs(rows)
    expected = reference.linear(scheme, x, w, PARTS, INPUT_SCALES if scheme == "fp8s" else None)
    error = (filled(scheme, w)(x, RULE) - expected).abs().max() / expected.abs().max()
    assert float(error) < RELATIVE


@pytest.mark.parametrize("scheme", SCHEMES)
def test_codes_do_not_depend_on_the_blocks(scheme: str) -> None:
    w = weight()
    a, b = filled(scheme, w, 1), filled(scheme, w, 1000)
    assert torch.equal(a.weight.view(torch.uint8), b.weight.view(torch.uint8))
    assert torch.equal(a.weight_scale, b.weight_scale)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_of_zeros_give_zeros(scheme: str) -> None:
    out = filled(scheme, weight())(inputs(20), RULE)
    assert torch.isfinite(out).all()
    assert (out[:, 3] == 0).all()
    assert (out[:, PARTS[0] : PARTS[0] + PARTS[1]] == 0).all()
    assert (out[10] == 0).all()


def is_invariant(scheme: str) -> bool:
    linear, x = filled(scheme, weight()), inputs(130)
    whole = linear(x, RULE)
    return all(torch.equal(linear(x[i : i + n], RULE), whole[i : i + n]) for i, n in ((0, 1), (5, 33), (100, 30)))


@pytest.mark.parametrize("scheme", ["fp8s", "fp8row", "w8a16", "w8a8"])
def test_a_row_alone_has_the_bits_that_it_has_among_others(scheme: str) -> None:
    assert is_invariant(scheme)


def test_the_scale_of_the_stream_is_shared_and_says_so() -> None:
    assert not is_invariant("fp8")


def test_a_static_scale_cuts_what_is_beyond_it() -> None:
    linear = filled("fp8s", weight())
    x = torch.full((1, IN), 1e6)
    limit = torch.full((1, IN), 448 * 0.015625)
    last = slice(PARTS[0] + PARTS[1], None)
    assert torch.equal(linear(x, RULE)[:, last], linear(limit, RULE)[:, last])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_not_a_number_stays_in_its_row(scheme: str) -> None:
    x = inputs(8)
    x[2, 5] = math.nan
    out = filled(scheme, weight())(x, RULE)
    assert out[2].isnan().all()
    if scheme != "fp8":
        assert torch.isfinite(out[3:]).all()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused(scheme: str, bad: float) -> None:
    w = weight()
    w[-1, -1] = bad
    with pytest.raises(ValueError, match="not finite"):
        filled(scheme, w)


def test_unpacked_weights_are_near_the_packed_ones() -> None:
    """At most half a step away: 1/16 of the value in e4m3 (2^-10 of the scale near zero), half the scale in int8."""
    w = weight()
    codes, scales = fp8row.pack(w)
    bound = torch.maximum(w.abs() / 16, scales[:, None] * 2**-10)
    assert ((fp8row.unpack(codes, scales) - w).abs() <= bound * 1.0001).all()
    for module in (w8a16, w8a8):
        codes, scales = module.pack(w)
        assert ((module.unpack(codes, scales) - w).abs() <= scales[:, None] * 0.5001).all()
    scale = fp8.weight_scale(in_blocks(w, 9))
    unpacked = fp8.unpack(fp8.quantize(w, scale), scale)
    assert ((unpacked - w).abs() <= torch.maximum(w.abs() / 16, scale * 2**-10) * 1.0001).all()


def test_unknown_schemes_are_an_error() -> None:
    with pytest.raises(ValueError, match="int3"):
        make_linear("int3", 4, (2,))
