"""What `tests.support.triton_interpreter` corrects, each against torch; without the correction its test fails."""

import os
import warnings

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.support.triton_interpreter import has_device

pytestmark = pytest.mark.skipif(has_device(), reason="kernels run on the device, not interpreted")

E4M3 = torch.float8_e4m3fn


@triton.jit
def _cast_kernel(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, tl.load(x + at).to(y.dtype.element_ty))


@triton.jit
def _dot_kernel(a, b, out, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + at, tl.dot(tl.load(a + at), tl.trans(tl.load(b + at))))


@triton.jit
def _exp_kernel(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, tl.exp(tl.load(x + at)))


@triton.jit
def _count_kernel(bounds, out):
    total = 0
    for i in tl.range(tl.load(bounds), tl.load(bounds + 1)):
        total += i
    tl.store(out, total)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(len(x), dtype=dtype)
    _cast_kernel[(1,)](x, out, len(x))
    return out


def neighbourhoods(values: Tensor) -> Tensor:
    """float32 values, what lies halfway between neighbours, and five float32 steps to each side of all of these."""
    points = values.unique()
    points = torch.cat([points, (points[1:] + points[:-1]) / 2])
    steps = points.view(torch.int32)[:, None] + torch.arange(-5, 6, dtype=torch.int32)
    near = steps.view(torch.float32).flatten()
    return near[near.isfinite()]


def all_codes(dtype: torch.dtype) -> Tensor:
    """Every value of a narrow float type, as float32."""
    bits = torch.arange(1 << (8 * dtype.itemsize), dtype=torch.int32)
    return bits.to(torch.uint8 if dtype.itemsize == 1 else torch.int16).view(dtype).float()


def padded(x: Tensor) -> Tensor:
    """Up to a power of two, which ranges in kernels are."""
    return torch.cat([x, x.new_zeros(triton.next_power_of_2(len(x)) - len(x))])


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_float32_to_e4m3_rounds_to_nearest_even() -> None:
    """Every code and every tie with five neighbours on both sides, subnormals, what overflows, random bits."""
    finite = all_codes(E4M3)
    finite = finite[finite.isfinite()]
    random = torch.randint(-(1 << 31), (1 << 31) - 1, (1 << 16,), generator=torch.Generator().manual_seed(0))
    random = random.to(torch.int32).view(torch.float32)
    extremes = torch.tensor([0.0, -0.0, 447.9, 464.0, 480.0, -1e30, float("inf"), -float("inf"), float("nan")])
    x = padded(torch.cat([neighbourhoods(finite), random, extremes]))
    assert same_bits(cast(x, E4M3), x.to(E4M3))


def test_float32_to_bf16_rounds_to_nearest_even() -> None:
    ends = all_codes(torch.bfloat16)
    x = padded(neighbourhoods(ends[ends.isfinite()][::7]))
    assert same_bits(cast(x, torch.bfloat16), x.bfloat16())


def test_int8_to_bf16_keeps_the_number() -> None:
    x = torch.arange(-128, 128).to(torch.int8)
    assert same_bits(cast(x, torch.bfloat16), x.bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=str)
def test_narrow_types_to_float32(dtype: torch.dtype) -> None:
    """Every value comes out as it is, subnormals and NaN too."""
    x = all_codes(dtype)
    torch.testing.assert_close(cast(x.to(dtype), torch.float32), x, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=str)
def test_dot(dtype: torch.dtype) -> None:
    a, b = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0)).to(dtype).unbind(0)
    out = torch.empty(16, 16)
    _dot_kernel[(1,)](a, b, out, 16)
    torch.testing.assert_close(out, a.float() @ b.float().t(), rtol=1e-5, atol=1e-5)


def test_overflow_is_no_warning() -> None:
    x, out = torch.tensor([1e4, 0.0]), torch.empty(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _exp_kernel[(1,)](x, out, 2)
    assert out.tolist() == [float("inf"), 1.0]


def test_children_do_not_inherit_the_setting() -> None:
    assert "TRITON_INTERPRET" not in os.environ
    assert triton.knobs.runtime.interpret


def test_bounds_of_a_loop_may_come_from_memory() -> None:
    out = torch.zeros(1, dtype=torch.int32)
    _count_kernel[(1,)](torch.tensor([3, 7], dtype=torch.int32), out)
    assert out.item() == 3 + 4 + 5 + 6
