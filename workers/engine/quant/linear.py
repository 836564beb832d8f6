"""What the linear layers of all schemes share: rows quantized part by part, and the plain form that runs anywhere."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from workers.engine.kernels.linear import linear
from workers.engine.kernels.products import RowRule

Blocks = Callable[[], Iterator[tuple[int, Tensor]]]
"""(first row, float32 rows [n, K]) of one checkpoint tensor, in order. May be called again."""

_CHUNK = 1024  # rows of the weight turned to float32 at a time


class QuantLinear(nn.Module, ABC):
    """x [T, K] → [T, O] with the weight in a scheme's codes.

    parts         rows of each checkpoint tensor that lies in the weight, top to bottom
    weight        [O, K] codes
    weight_scale  [O] float32: a row is codes · scale. A scheme with one scale per tensor repeats it over its rows

    `forward` is the scheme's definition in float32 on any device: activations are rounded as the scheme rounds them,
    the product runs over the codes, scales come last. Row-invariant where the scheme is.
    """

    weight_scale: Tensor

    def __init__(self, in_features: int, parts: Sequence[int], codes: torch.dtype) -> None:
        super().__init__()
        self.parts = tuple(parts)
        self.weight = nn.Parameter(torch.empty(sum(parts), in_features, dtype=codes), requires_grad=False)
        self.register_buffer("weight_scale", torch.empty(sum(parts), dtype=torch.float32))

    def rows_of(self, part: int) -> slice:
        """Where a part lies in the weight."""
        first = sum(self.parts[:part])
        return slice(first, first + self.parts[part])

    @abstractmethod
    def put(self, part: int, blocks: Blocks) -> None:
        """Quantize one part from float32 rows. ValueError where a value is not finite."""

    @abstractmethod
    def quantize_input(self, x: Tensor, part: int) -> tuple[Tensor, Tensor]:
        """(x rounded to the scheme's codes, as float32; its scale, [1] or [T, 1]) for the product with one part."""

    def product(self, codes: Tensor, weight: Tensor, rule: RowRule) -> Tensor:
        """codes [T, K] · weight [O', K]ᵀ in float32, weight as codes."""
        return torch.cat([linear(codes, rows.float(), rule) for rows in torch.split(weight, _CHUNK)], dim=1)

    def forward(self, x: Tensor, rule: RowRule) -> Tensor:
        """x [T, K] → [T, O] in the type of x."""
        dtype, x, out = x.dtype, x.float(), []
        for part in range(len(self.parts)):
            rows = self.rows_of(part)
            codes, scale = self.quantize_input(x, part)
            out.append(self.product(codes, self.weight[rows], rule) * scale * self.weight_scale[rows])
        return torch.cat(out, dim=1).to(dtype)
