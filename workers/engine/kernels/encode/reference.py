"""Every encoding as its formula, in the type that it is given; quotients and codes are made from float32."""

import torch
from torch import Tensor

from workers.engine.kernels.encoding import Activation, Codes, Encoding, Kind

LARGEST = {"fp8_static": 448.0, "fp8_stream": 448.0, "fp8_row": 448.0, "int8_row": 127.0}
"""Kind → the largest magnitude of its codes."""


def scale(y: Tensor, kind: Kind) -> Tensor:
    """y [T, K] → float32 [1] over all rows, or [T]: max|y| / largest; 1 for zeros, and never subnormal."""
    y = y.float().abs()
    amax = y.amax().view(1) if kind == "fp8_stream" else y.amax(dim=1)
    # A tensor divides: by a plain number a GPU multiplies with the rounded reciprocal.
    step = amax / torch.full_like(amax, LARGEST[kind])
    return torch.where(amax == 0, 1.0, step.clamp(min=torch.finfo(torch.float32).tiny))


def codes(y: Tensor, scale: Tensor, kind: Kind) -> Tensor:
    """y [T, K], scale [1] or [T] → y / scale to nearest, ties to even; what lies beyond the largest code becomes it."""
    quotient = (y.float() / scale[:, None]).clamp(-LARGEST[kind], LARGEST[kind])
    return quotient.round().to(torch.int8) if kind == "int8_row" else quotient.to(torch.float8_e4m3fn)


def encode(y: Tensor, encoding: Encoding) -> Activation:
    """y [T, K] in `encoding`."""
    if encoding.kind == "float":
        return y.to(encoding.dtype)
    step = encoding.scale if encoding.kind == "fp8_static" else scale(y, encoding.kind)
    assert step is not None
    return Codes(codes(y, step, encoding.kind), step)
