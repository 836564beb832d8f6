"""The CPU's linears take plain numbers and quantize them themselves."""

import torch
from torch import Tensor

from workers.engine.kernels.encoding import Activation, Encoding


def empty(rows: int, width: int, encoding: Encoding) -> Tensor:
    """Room for encoded rows. ValueError for a kind with codes."""
    if encoding.kind != "float":
        raise ValueError(f"the CPU has no encoding of kind {encoding.kind}")
    return torch.empty(rows, width, dtype=encoding.dtype)


def encode(y: Tensor, encoding: Encoding) -> Activation:
    """y [T, K] rounded to the encoding's dtype. ValueError for a kind with codes."""
    if encoding.kind != "float":
        raise ValueError(f"the CPU has no encoding of kind {encoding.kind}")
    return y.to(encoding.dtype)
