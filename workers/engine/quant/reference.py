"""The schemes' arithmetic from its definition, in plain torch. Written to be believed; used by the tests."""

import torch
from torch import Tensor

_LARGEST, _SMALLEST_EXPONENT, _MANTISSA_BITS = 448.0, -6, 3


def e4m3(x: Tensor) -> Tensor:
    """float32 → the nearest value of e4m3, ties to the even mantissa, beyond ±448 → ±448, as float32.

    Between 2^e and 2^(e+1) the values lie 2^(e-3) apart; below 2^-6 they lie as far apart as just above it.
    """
    wide = x.double()
    exponent = torch.frexp(wide).exponent - 1  # |x| = m · 2^exponent, 1 ≤ m < 2
    step = torch.pow(2.0, exponent.clamp(min=_SMALLEST_EXPONENT) - _MANTISSA_BITS).double()
    return ((wide / step).round() * step).clamp(-_LARGEST, _LARGEST).float()


def int8(x: Tensor) -> Tensor:
    """float32 → the nearest whole number within ±127, ties to even, as float32."""
    return x.double().round().clamp(-127, 127).float()


def scale(largest: Tensor, end: float) -> Tensor:
    """The step that takes `largest` to the end of the range; 1 for zero."""
    return torch.where(largest == 0, torch.ones_like(largest), largest / end)


def linear(
    scheme: str, x: Tensor, weight: Tensor, parts: tuple[int, ...], input_scales: Tensor | None = None
) -> Tensor:
    """x [T, K] · weight [O, K]ᵀ as a scheme computes it, sums in float64 → [T, O] float32.

    parts         rows of each checkpoint tensor in the weight
    input_scales  [parts], for `fp8s`
    """
    out = []
    for i, rows in enumerate(weight.split(parts)):  # type: ignore[no-untyped-call]
        x_codes, x_scale = _input(scheme, x, None if input_scales is None else input_scales[i])
        w_codes, w_scale = _weight(scheme, rows)
        out.append((x_codes.double() @ w_codes.double().t()) * x_scale.double() * w_scale.double().t())
    return torch.cat(out, dim=1).float()


def _input(scheme: str, x: Tensor, fixed: Tensor | None) -> tuple[Tensor, Tensor]:
    rows = x.abs().amax(dim=1, keepdim=True)
    match scheme:
        case "w8a16":
            return x.bfloat16().float(), torch.ones(1)
        case "w8a8":
            return int8(x / scale(rows, 127)), scale(rows, 127)
        case "fp8row":
            return e4m3(x / scale(rows, 448)), scale(rows, 448)
        case _:
            step = scale(x.abs().max(), 448) if fixed is None else fixed
            return e4m3(x / step), step


def _weight(scheme: str, weight: Tensor) -> tuple[Tensor, Tensor]:
    rows = weight.abs().amax(dim=1, keepdim=True)
    if scheme in ("w8a16", "w8a8"):
        return int8(weight / scale(rows, 127)), scale(rows, 127)
    step = scale(rows if scheme == "fp8row" else weight.abs().max().expand(len(weight), 1), 448)
    return e4m3(weight / step), step
