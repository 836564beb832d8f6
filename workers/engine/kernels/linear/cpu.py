"""Library products under the row rule."""

from torch import Tensor

from workers.engine.kernels.products import RowRule, linear_into, pad_rows


def linear(x: Tensor, weight: Tensor, rule: RowRule) -> Tensor:
    """x [T, K] · weight [O, K]ᵀ → [T, O]; rows are padded for the product and cut off again."""
    padded = pad_rows(x, rule)
    out = padded.new_empty(padded.shape[0], weight.shape[0])
    return linear_into(out, padded, weight, rule)[: x.shape[0]]
