"""The GPU's head under the interpreter: several tiles and sweeps, ragged in rows, vocabulary and entries."""

from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.support.triton_interpreter import has_device
from workers.engine.kernels.lm_head import kernel, reference

pytestmark = pytest.mark.skipif(has_device(), reason="kernels run on the device, not interpreted")

V, K = 107, 80


@pytest.fixture(autouse=True)
def small_tiles() -> Iterator[None]:
    sizes = {"ROWS": 16, "VOCAB": 32, "BLOCK_K": 32, "ENTRIES": 16, "MAX_ROWS": 32}
    with patch.multiple(kernel, **sizes):
        yield


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact(*shape: int, seed: int) -> Tensor:
    """Sixteenths whose products sum without rounding: the interpreter's library sums by a row's place, the card not."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)) / 16


def weight() -> Tensor:
    return draw(V, K, seed=1).bfloat16()


def entries(rows: int, count: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(count)
    return tuple(torch.randint(0, end, (count,), generator=source) for end in (rows, V))  # type: ignore[return-value]


def bound(x: Tensor, w: Tensor) -> float:
    """How far a log-probability may be off: twice a logit, for the entry and in the sum.

    A logit is off by K roundings of 2^-24 of the sum of magnitudes, and by a few units in the last place of the cap and
    of the exponential, whose argument is rounded too. The sum over the vocabulary adds a rounding for each halving.
    """
    magnitudes = (x.bfloat16().double().abs() @ w.double().abs().t()).max()
    return float(2 * (K + 16) * magnitudes * 2**-24)


@pytest.mark.parametrize("softcap", [None, 5.0, 30.0], ids=str)
@pytest.mark.parametrize(("rows", "count"), [(1, 1), (16, 40), (17, 5), (40, 50)])
def test_log_probabilities(rows: int, count: int, softcap: float | None) -> None:
    x, w = draw(rows, K, seed=rows) * 0.7, weight()
    at = entries(rows, count)
    out = kernel.lm_head_logprobs(x, w, *at, softcap)
    assert out.dtype == torch.float32
    assert (out - reference.lm_head_logprobs(x.bfloat16(), w, *at, softcap)).abs().max() < bound(x, w)


@pytest.mark.parametrize("softcap", [None, 5.0], ids=str)
def test_a_whole_row_sums_to_one(softcap: float | None) -> None:
    x = draw(3, K, seed=3)
    rows, cols = torch.arange(3).repeat_interleave(V), torch.arange(V).repeat(3)
    out = kernel.lm_head_logprobs(x, weight(), rows, cols, softcap)
    assert (out.double().exp().view(3, V).sum(1) - 1).abs().max() < 2e-6


def test_a_row_has_the_same_bits_in_any_company() -> None:
    """Among other rows and entries, in another order, at another place in tile and sweep."""
    x, w = exact(40, K, seed=5), exact(V, K, seed=6).bfloat16()
    rows, cols = torch.arange(40).repeat_interleave(3), torch.tensor([0, 70, V - 1]).repeat(40)
    whole = kernel.lm_head_logprobs(x, w, rows, cols, 7.0).view(40, 3)
    for first, count in ((0, 1), (3, 17), (7, 33), (39, 1)):
        part = kernel.lm_head_logprobs(
            x[first : first + count], w, rows[: 3 * count].flip(0), cols[: 3 * count].flip(0), 7.0
        )
        assert torch.equal(part.flip(0).view(count, 3), whole[first : first + count]), (first, count)


def test_no_entries() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert kernel.lm_head_logprobs(draw(16, K, seed=1), weight(), none, none, None).shape == (0,)


def test_one_certain_token() -> None:
    """Logits far apart: the sum is one term, and the others do not underflow into something else than zero."""
    w = torch.zeros(V, K, dtype=torch.bfloat16)
    w[V - 1, 0] = 1.0
    x = torch.zeros(2, K)
    x[0, 0] = 1000.0
    out = kernel.lm_head_logprobs(x, w, torch.tensor([0, 0, 1]), torch.tensor([V - 1, 0, 4]), None)
    assert out[:2].tolist() == [0.0, -1000.0]
    assert abs(out[2].item() + torch.tensor(float(V)).log().item()) < 1e-6


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")  # the interpreter's maximum
def test_what_is_not_a_number_stays_in_its_row() -> None:
    x = draw(20, K, seed=5)
    x[7, 3] = float("nan")
    out = kernel.lm_head_logprobs(x, weight(), torch.arange(20), torch.arange(20), 5.0)
    assert out[7].isnan()
    assert torch.isfinite(torch.cat((out[:7], out[8:]))).all()


def test_a_head_in_float32_is_refused() -> None:
    with pytest.raises(TypeError, match=r"torch\.float32"):
        kernel.lm_head_logprobs(draw(2, K, seed=1), weight().float(), *entries(2, 2), None)


@triton.jit
def _tanh_kernel(z, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, kernel._tanh(tl.load(z + at)))


def test_tanh() -> None:
    """Within 3 units in the last place: from subnormals over the change of formula to where it is 1."""
    z = torch.cat([torch.logspace(-40, 2, 2000), torch.linspace(0.2, 0.3, 2000), torch.tensor([0.0, float("inf")])])
    z = torch.cat([z, -z])
    z = torch.cat([z, z.new_zeros(triton.next_power_of_2(len(z)) - len(z))])
    out = torch.empty_like(z)
    _tanh_kernel[(1,)](z, out, len(z))
    expected = torch.tanh(z.double())
    assert ((out.double() - expected).abs() <= 3 * 2**-24 * expected.abs() * 2).all()
