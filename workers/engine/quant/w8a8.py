"""`w8a8`: int8 weights with one scale per output channel, stored as `w8a16` stores them; int8 activations per token."""

from torch import Tensor

from workers.engine.kernels.products import RowRule
from workers.engine.quant.rounding import to_int8
from workers.engine.quant.w8a16 import W8A16Linear, pack, row_scales, unpack

__all__ = ["W8A8Linear", "pack", "row_scales", "unpack"]


class W8A8Linear(W8A16Linear):
    """int8 · int8, summed exactly."""

    kind = "int8_row"

    def quantize_input(self, x: Tensor, part: int) -> tuple[Tensor, Tensor]:
        scales = row_scales(x)
        return to_int8(x / scales).float(), scales

    def product(self, codes: Tensor, weight: Tensor, rule: RowRule) -> Tensor:
        """The sums as float64 holds them, exactly: below 2^53 for any K. They are rounded to float32 once."""
        return (codes.double() @ weight.double().t()).float()
