"""Quantization schemes of linear layers, one file each, and the stored form of static fp8.

A scheme's file defines its codes and scales once: `quantize` or `pack`, `unpack`, and the linear layer, used by the
loader and by the exporter alike. The layer's `forward` is the scheme's definition in plain float32 on the CPU, and on a
GPU the product of the codes themselves.
"""

from collections.abc import Sequence

import torch

from workers.engine.quant.fp8 import Fp8Linear
from workers.engine.quant.fp8row import Fp8RowLinear
from workers.engine.quant.linear import QuantLinear
from workers.engine.quant.w8a8 import W8A8Linear
from workers.engine.quant.w8a16 import W8A16Linear

__all__ = ["SCHEMES", "Fp8Linear", "QuantLinear", "make_linear"]

SCHEMES = ("fp8s", "fp8", "fp8row", "w8a16", "w8a8")


def make_linear(scheme: str, in_features: int, parts: Sequence[int], dtype: torch.dtype = torch.float32) -> QuantLinear:
    """An empty linear of a scheme; see `QuantLinear` for `parts` and `dtype`."""
    match scheme:
        case "fp8s" | "fp8":
            return Fp8Linear(in_features, parts, dtype, static=scheme == "fp8s")
        case "fp8row":
            return Fp8RowLinear(in_features, parts, dtype)
        case "w8a16":
            return W8A16Linear(in_features, parts, dtype)
        case "w8a8":
            return W8A8Linear(in_features, parts, dtype)
        case _:
            raise ValueError(f"unknown scheme {scheme!r} (known: {', '.join(SCHEMES)})")
