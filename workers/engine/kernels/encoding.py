"""What passes between the ops of a layer: numbers as they are, or a scheme's codes with their scales."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["float", "fp8_static", "fp8_stream", "fp8_row", "int8_row"]


@dataclass(frozen=True, slots=True)
class Encoding:
    """How a linear wants its input. y is in float32 until the one rounding to `dtype`.

    float       y rounded to `dtype`
    fp8_static  e4m3(y / scale), `scale` [1] float32: calibrated and fixed
    fp8_stream  e4m3(y / s), s = max|y| / 448 over all rows: rows that run together share it
    fp8_row     e4m3(y / s), s = max|y| / 448 of the row
    int8_row    int8(y / s), s = max|y| / 127 of the row
    """

    kind: Kind
    dtype: torch.dtype
    scale: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Codes:
    """values [T, K] e4m3 or int8; scale [1] or [T] float32: a row is values · scale."""

    values: Tensor
    scale: Tensor

    def select(self, rows: Tensor) -> "Codes":
        """The rows [R] of it."""
        # e4m3 has no gather on every device: its bytes do
        values = self.values.view(torch.uint8).index_select(0, rows).view(self.values.dtype)
        return Codes(values, self.scale if self.scale.shape[0] == 1 else self.scale.index_select(0, rows))

    def split(self, rows: int) -> list["Codes"]:
        """Runs of up to `rows` rows, views of it."""
        parts = torch.split(self.values, rows)
        if self.scale.shape[0] == 1:
            return [Codes(part, self.scale) for part in parts]
        return [Codes(*pair) for pair in zip(parts, torch.split(self.scale, rows), strict=True)]


Activation = Tensor | Codes
"""[T, K]: a plain tensor for the kind `float`, codes for the others."""


def select_rows(x: Activation, rows: Tensor) -> Activation:
    """x[rows]."""
    return x.select(rows) if isinstance(x, Codes) else x.index_select(0, rows)


def split_rows(x: Activation, rows: int) -> list[Activation]:
    """x in runs of up to `rows` rows."""
    return [*x.split(rows)] if isinstance(x, Codes) else [*torch.split(x, rows)]
