"""Rounding and scales that the schemes share. Everything in float32.

Letters as in `kernels`: T rows of the pass, K input width, O output width.
"""

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
INT8_MAX = 127.0
_TINY = torch.finfo(torch.float32).tiny


def scale_for(amax: Tensor, largest: float) -> Tensor:
    """amax / largest, the step that maps the largest magnitude to the end of the code's range.

    1 where everything is zero, and never below the smallest normal float32: a quotient by a subnormal has no precision.
    """
    # A tensor on the same device: by a plain number, CUDA multiplies with its reciprocal, which rounds otherwise.
    end = torch.full_like(amax, largest)
    return torch.where(amax == 0, 1.0, (amax / end).clamp(min=_TINY))


def to_e4m3(x: Tensor) -> Tensor:
    """float32 → e4m3, to nearest, ties to even; what lies beyond ±448, infinities too, becomes ±448. NaN stays NaN."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def to_int8(x: Tensor) -> Tensor:
    """float32 → int8, to nearest, ties to even, within ±127: the range is symmetric. NaN has no code."""
    return x.round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8)


def check_finite(values: Tensor) -> None:
    """ValueError where one is NaN or infinite: neither has a code, and an infinite scale zeroes all others."""
    if not torch.isfinite(values).all():
        raise ValueError("holds a value that is not finite")
