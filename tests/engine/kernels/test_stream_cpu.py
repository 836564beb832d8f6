"""The fused ops on the CPU: the bits of the ops that they are made of, and what they refuse."""

from collections.abc import Callable

import pytest
import torch

from tests.support.streams import draw, encoding, same_bits
from workers.engine.kernels.encode import encode
from workers.engine.kernels.encoding import Activation, Encoding
from workers.engine.kernels.gelu_mul import gelu_mul, gelu_mul_encode
from workers.engine.kernels.rms_norm import norm_encode, residual_norm, rms_norm
from workers.engine.kernels.rotary import HeadLayout, qkv_norm_rotary

EPS = 1e-6
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scalar", [None, 0.37], ids=["plain", "layer-scalar"])
def test_residual_norm_has_the_bits_of_its_ops(scalar: float | None, dtype: torch.dtype) -> None:
    x, h, post, scale = draw(17, 96), draw(17, 96, seed=1).to(dtype), draw(96, seed=2), draw(96, seed=3)
    factor = None if scalar is None else torch.tensor([scalar])
    added = x + rms_norm(h, post, EPS)
    expected = added if factor is None else added * factor
    result = residual_norm(x, h, post, factor, scale, EPS, Encoding("float", dtype))
    assert isinstance(result, torch.Tensor)
    assert same_bits(x, expected)
    assert same_bits(result, rms_norm(expected, scale, EPS, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_and_gelu_have_the_bits_of_their_ops(dtype: torch.dtype) -> None:
    x, scale, wanted = draw(17, 96), draw(96, seed=1), Encoding("float", dtype)
    normed, gated = norm_encode(x, scale, EPS, wanted), gelu_mul_encode(x.to(dtype), wanted)
    assert isinstance(normed, torch.Tensor)
    assert isinstance(gated, torch.Tensor)
    assert same_bits(normed, rms_norm(x, scale, EPS, dtype))
    assert same_bits(gated, gelu_mul(x.to(dtype)))


ROWS = draw(16, 16)
REFUSED: list[Callable[[Encoding], Activation]] = [
    lambda wanted: encode(ROWS, wanted),
    lambda wanted: norm_encode(ROWS, None, EPS, wanted),
    lambda wanted: residual_norm(ROWS.clone(), ROWS, ROWS[0], None, ROWS[0], EPS, wanted),
    lambda wanted: gelu_mul_encode(ROWS, wanted),
]


@pytest.mark.parametrize("name", ["static", "stream", "row", "int8"])
@pytest.mark.parametrize("op", REFUSED, ids=["encode", "norm_encode", "residual_norm", "gelu_mul_encode"])
def test_codes_are_refused(op: Callable[[Encoding], Activation], name: str) -> None:
    with pytest.raises(ValueError, match="the CPU has no"):
        op(encoding(name))


def test_what_only_a_gpu_has_is_refused() -> None:
    one, layout = torch.ones(3), HeadLayout(1, 1, 8)
    with pytest.raises(ValueError, match="no activation of kind float"):
        gelu_mul_encode(ROWS, Encoding("float", torch.bfloat16))
    with pytest.raises(ValueError, match="the CPU has no"):
        gelu_mul_encode(ROWS, Encoding("float", torch.float32), one[:2])
    qkv, scale, table = draw(16, 24), torch.ones(8), torch.ones(16, 4)
    for extra in ({"pending": one}, {"extra_rows": 1}):
        with pytest.raises(ValueError, match="on the CPU"):
            qkv_norm_rotary(qkv, layout, scale, scale, table, table, EPS, **extra)  # type: ignore[arg-type]
