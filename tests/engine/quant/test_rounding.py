"""Codes and scales against their definitions, bit by bit."""

import math

import pytest
import torch
from torch import Tensor

from workers.engine.quant import fp8, reference
from workers.engine.quant.rounding import check_finite, scale_for, to_e4m3, to_int8

CODES = torch.arange(256, dtype=torch.uint8)
VALUES = CODES.view(torch.float8_e4m3fn).float()  # by the storage type's own table
FINITE = VALUES[~VALUES.isnan()].unique()  # 253 numbers: zero once


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def code_of(bits: int) -> float:
    """A code's value by the format: sign, four bits of exponent with bias 7, three of mantissa; no infinities."""
    sign, exponent, mantissa = -1.0 if bits & 128 else 1.0, bits >> 3 & 15, bits & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def test_the_type_is_the_format_that_is_meant() -> None:
    expected = torch.tensor([code_of(bits) for bits in range(256)])
    assert same_bits(torch.nan_to_num(VALUES, nan=999.0), torch.nan_to_num(expected, nan=999.0))
    assert float(FINITE.max()) == 448.0
    assert float(FINITE[FINITE > 0].min()) == 2.0**-9


def test_every_value_keeps_its_code() -> None:
    numbers = VALUES[~VALUES.isnan()]
    assert torch.equal(to_e4m3(numbers).view(torch.uint8), CODES[~VALUES.isnan()])
    assert same_bits(reference.e4m3(numbers), numbers)


def test_midpoints_go_to_the_even_mantissa_and_neighbours_to_the_nearest() -> None:
    low, high = FINITE[:-1], FINITE[1:]
    middle = (low.double() + high.double()).div(2).float()  # exact: one more bit
    even = torch.where((low.to(torch.float8_e4m3fn).view(torch.uint8) & 1) == 0, low, high)
    assert torch.equal(to_e4m3(middle).float(), even)
    assert torch.equal(reference.e4m3(middle), even)
    for toward, expected in ((torch.inf, high), (-torch.inf, low)):
        beside = torch.nextafter(middle, torch.full_like(middle, toward))
        assert torch.equal(to_e4m3(beside).float(), expected)
        assert torch.equal(reference.e4m3(beside), expected)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (447.9, 448.0),
        (464.0, 448.0),
        (480.0, 448.0),
        (1e30, 448.0),
        (-464.0, -448.0),
        (math.inf, 448.0),
        (-math.inf, -448.0),
        (2.0**-10, 0.0),
        (1.0001 * 2.0**-10, 2.0**-9),
        (-3 * 2.0**-10, -4 * 2.0**-10),
        (1e-45, 0.0),
    ],
)
def test_ends_of_the_range(value: float, expected: float) -> None:
    assert float(to_e4m3(torch.tensor(value))) == expected
    if math.isfinite(value):
        assert float(reference.e4m3(torch.tensor(value))) == expected


def test_not_a_number_stays_one() -> None:
    assert to_e4m3(torch.tensor(math.nan)).float().isnan()


@pytest.mark.parametrize("spread", [1e-4, 0.02, 1.0, 30.0, 300.0])
def test_random_values_round_as_the_reference(spread: float) -> None:
    x = torch.randn(200_003, generator=torch.Generator().manual_seed(1)) * spread
    assert torch.equal(to_e4m3(x).float(), reference.e4m3(x))
    assert torch.equal(to_int8(x).float(), reference.int8(x))


def test_int8_ties_go_to_even_and_the_range_is_symmetric() -> None:
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.4, 127.5, -127.5, -128.0, 1e9])
    assert to_int8(x).tolist() == [0, 2, 2, 0, -2, 126, 127, 127, -127, -127, 127]


def test_scales() -> None:
    amax = torch.tensor([448.0, 1.0, 0.0, 1e-44])
    tiny = torch.finfo(torch.float32).tiny
    assert scale_for(amax, 448.0).tolist() == [1.0, float(torch.tensor(1.0) / 448), 1.0, tiny]


def test_the_largest_weight_gets_the_last_code() -> None:
    w = torch.randn(37, 53, generator=torch.Generator().manual_seed(2))
    scale = fp8.weight_scale(lambda: iter([(0, w[:20]), (20, w[20:])]))
    assert same_bits(scale, (w.abs().max() / 448).reshape(1))
    codes = fp8.quantize(w, scale)
    assert float(codes.float().abs().max()) == 448.0
    assert same_bits(codes.float(), reference.e4m3(w / scale))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(bad: float) -> None:
    w = torch.zeros(4, 5)
    w[3, 2] = bad
    with pytest.raises(ValueError, match="not finite"):
        fp8.weight_scale(lambda: iter([(0, w[:2]), (2, w[2:])]))
    with pytest.raises(ValueError, match="not finite"):
        check_finite(w)


@pytest.mark.parametrize("exponent", [-40, -3, 0, 1, 7, 60])
def test_input_scale_is_exact_at_powers_of_two(exponent: int) -> None:
    edge = 224 * 2.0**exponent  # 2 · amax / 448 = 2^exponent
    above = float(torch.nextafter(torch.tensor(edge), torch.tensor(math.inf)))
    assert fp8.input_scale(edge) == 2.0**exponent
    assert fp8.input_scale(above) == 2.0 ** (exponent + 1)
    assert fp8.input_scale(edge * 0.75) == 2.0**exponent
    assert fp8.input_scale(edge / 2) == 2.0 ** (exponent - 1)


def test_twice_the_largest_input_still_fits() -> None:
    for amax in torch.rand(1000, generator=torch.Generator().manual_seed(3)).mul(100).tolist():
        scale = fp8.input_scale(amax)
        assert 224 < 2 * amax / scale <= 448


def test_input_scale_of_odd_maxima() -> None:
    assert fp8.input_scale(0.0) == 1.0
    assert fp8.input_scale(1e-45) == 2.0**-126
    for bad in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="largest input"):
            fp8.input_scale(bad)
