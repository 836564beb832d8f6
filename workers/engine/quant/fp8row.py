"""`fp8row`: e4m3 weights with one scale per output channel, e4m3 activations with one scale per token."""

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.engine.quant.linear import Blocks, QuantLinear
from workers.engine.quant.rounding import E4M3, E4M3_MAX, check_finite, scale_for, to_e4m3


def row_scales(rows: Tensor) -> Tensor:
    """max|row| / 448, [n, K] → [n, 1]."""
    return scale_for(rows.abs().amax(dim=1, keepdim=True), E4M3_MAX)


def pack(rows: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [n, K] → (e4m3 [n, K], scales [n]). ValueError where a value is not finite."""
    scales = row_scales(rows)
    check_finite(scales)
    return to_e4m3(rows / scales), scales.squeeze(1)


def unpack(codes: Tensor, scales: Tensor) -> Tensor:
    """The reverse of `pack`, but for its rounding: float32 [n, K]."""
    return codes.float() * scales.unsqueeze(1)


class Fp8RowLinear(QuantLinear):
    """e4m3 · e4m3, a scale per row on both sides."""

    kind = "fp8_row"

    def __init__(self, in_features: int, parts: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__(in_features, parts, E4M3, dtype)

    def put(self, part: int, blocks: Blocks) -> None:
        first = self.rows_of(part).start
        for row, rows in blocks():
            at = slice(first + row, first + row + len(rows))
            self.weight[at], self.weight_scale[at] = pack(rows)

    def quantize_input(self, x: Tensor, part: int) -> tuple[Tensor, Tensor]:
        scales = row_scales(x)
        return to_e4m3(x / scales).float(), scales
