"""`w8a16`: int8 weights with one scale per output channel, bf16 activations."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from workers.engine.kernels.encoding import Kind
from workers.engine.quant.linear import Blocks, QuantLinear
from workers.engine.quant.rounding import INT8_MAX, check_finite, scale_for, to_int8


def row_scales(rows: Tensor) -> Tensor:
    """max|row| / 127, [n, K] → [n, 1]."""
    return scale_for(rows.abs().amax(dim=1, keepdim=True), INT8_MAX)


def pack(rows: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [n, K] → (int8 [n, K], scales [n]). ValueError where a value is not finite."""
    scales = row_scales(rows)
    check_finite(scales)
    return to_int8(rows / scales), scales.squeeze(1)


def unpack(codes: Tensor, scales: Tensor) -> Tensor:
    """The reverse of `pack`, but for its rounding: float32 [n, K]."""
    return codes.float() * scales.unsqueeze(1)


class W8A16Linear(QuantLinear):
    """bf16 · int8: every code is a bf16 number, so the product needs no dequantized weight."""

    kind: ClassVar[Kind] = "float"

    def __init__(self, in_features: int, parts: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__(in_features, parts, torch.int8, dtype)

    def put(self, part: int, blocks: Blocks) -> None:
        first = self.rows_of(part).start
        for row, rows in blocks():
            at = slice(first + row, first + row + len(rows))
            self.weight[at], self.weight_scale[at] = pack(rows)

    def quantize_input(self, x: Tensor, part: int) -> tuple[Tensor, Tensor]:
        return x.bfloat16().float(), x.new_ones(1)
