"""The GPU's product under the interpreter: three kinds of operands, ragged sizes, rows that do not see each other."""

from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.support.triton_interpreter import has_device
from workers.engine.kernels.linear import reference

pytestmark = pytest.mark.skipif(has_device(), reason="kernels run on the device, not interpreted")

kernel = pytest.importorskip("workers.engine.kernels.linear.kernel", reason="Triton is not installed")

TILE, SMALL = kernel.tile, kernel.Tile(16, 32, 32, 4, 3)
KINDS = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "w8a16": (torch.bfloat16, torch.int8),
    "w8a8": (torch.int8, torch.int8),
}
SHAPES = [(1, 32, 32), (16, 64, 96), (17, 80, 33), (50, 208, 72), (33, 16, 5)]
"""T, K, O: whole tiles, and what hangs over them on each side."""


@pytest.fixture(autouse=True)
def small_tiles() -> Iterator[None]:
    """Several tiles and groups at sizes that are quick to interpret."""
    with patch.object(kernel, "tile", lambda *_: SMALL), patch.object(kernel, "GROUP", 2):
        yield


def draw(dtype: torch.dtype, *shape: int, seed: int) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    if dtype == torch.int8:
        return torch.randint(-127, 128, shape, generator=source, dtype=torch.int8)
    return torch.randn(*shape, generator=source).to(dtype)


def scale(count: int, seed: int) -> Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed)) + 0.01


def operands(kind: str, rows: int, k: int, channels: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    x, weight = (draw(dtype, n, k, seed=n) for dtype, n in zip(KINDS[kind], (rows, channels), strict=True))
    return x, weight, scale(rows, 1) if kind == "w8a8" else None, scale(channels, 2) if kind != "bf16" else None


def bound(x: Tensor, weight: Tensor, expected: Tensor, factors: Tensor) -> Tensor:
    """One rounding to bf16, 2^-8 of the result, and K roundings in float32, each 2^-24 of the sum of magnitudes."""
    magnitudes = reference.linear(x.abs(), weight.abs()) * factors
    return expected.abs() * 2**-8 + magnitudes * (x.shape[1] + 4) * 2**-24


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "k", "channels"), SHAPES)
def test_product(kind: str, rows: int, k: int, channels: int) -> None:
    x, weight, row_scale, channel_scale = operands(kind, rows, k, channels)
    factors = torch.ones(rows, channels)
    for factor in (row_scale[:, None] if row_scale is not None else None, channel_scale):
        factors = factors if factor is None else factors * factor
    expected = reference.linear(x, weight) * factors
    out = kernel.linear(x, weight, row_scale, channel_scale)
    assert out.dtype == torch.bfloat16
    assert ((out.float() - expected).abs() <= bound(x, weight, expected, factors)).all()


@pytest.mark.parametrize(("rows", "k", "channels"), SHAPES)
def test_int8_products_are_exact_until_they_are_scaled(rows: int, k: int, channels: int) -> None:
    """Bit for bit what the definition says: the sum as float32, times the row's scale, times the channel's, to bf16."""
    x, weight, row_scale, channel_scale = operands("w8a8", rows, k, channels)
    assert row_scale is not None
    expected = reference.linear(x, weight) * row_scale[:, None] * channel_scale
    assert torch.equal(kernel.linear(x, weight, row_scale, channel_scale), expected.bfloat16())


def test_the_largest_sums_of_int8_fit() -> None:
    x = torch.full((1, kernel.MAX_INT8_K), 127, dtype=torch.int8)
    with patch.object(kernel, "tile", lambda *_: kernel.Tile(16, 16, 1 << 14, 4, 3)):
        out = kernel.linear(x, x, torch.ones(1), torch.ones(1))
    assert out.item() == torch.tensor(127.0**2 * kernel.MAX_INT8_K).bfloat16().item()


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_in_any_company(kind: str) -> None:
    """Among fewer, more and other rows, and at another place in the tile."""
    x, weight, row_scale, channel_scale = operands(kind, 70, 80, 40)
    if kind == "bf16":  # eighths: the interpreter's library sums by a row's place where it rounds, the card does not
        x, weight = ((t * 8).round() / 8 for t in (x, weight))
    elif kind == "w8a16":
        x = (x * 8).round() / 8
    whole = kernel.linear(x, weight, row_scale, channel_scale)
    for first, count in ((0, 1), (0, 16), (3, 17), (37, 33), (69, 1)):
        here = slice(first, first + count)
        part = kernel.linear(x[here], weight, None if row_scale is None else row_scale[here], channel_scale)
        assert torch.equal(part.view(torch.int16), whole[here].view(torch.int16)), (first, count)


def test_what_is_not_a_number_stays_in_its_row() -> None:
    x, weight, _, _ = operands("bf16", 20, 80, 33)
    x[7, 3] = float("nan")
    out = kernel.linear(x, weight)
    assert out[7].isnan().all()
    assert torch.isfinite(torch.cat((out[:7], out[8:]))).all()


def test_other_operands_are_refused() -> None:
    with pytest.raises(TypeError, match=r"torch\.float32"):
        kernel.linear(torch.zeros(16, 16), torch.zeros(16, 16))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("channels", [3840, 8192, 30_720])
@pytest.mark.parametrize(("major", "memory"), [(8, 99 << 10), (9, 227 << 10), (12, 99 << 10)])
def test_tiles_fit(kind: str, channels: int, major: int, memory: int) -> None:
    """What the stages hold at once, within a block's shared memory."""
    x, weight = KINDS[kind]
    tile = TILE(x, weight, channels, major)
    held = tile.stages * tile.k * (tile.rows * x.itemsize + tile.channels * weight.itemsize)
    assert held <= memory
