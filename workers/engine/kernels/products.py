"""Matrix products whose rows do not depend on the other rows: the row rule and the products that keep it."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class RowRule:
    """How many rows a product may have.

    multiple  rows are padded to a multiple of this (a few rows go to a matrix-vector routine, which sums otherwise)
    fixed     None: any such count gives the same bits. A number: the library failed the sweep, and every product runs
              in pieces of exactly this many rows, copied to aligned memory
    """

    multiple: int = 16
    fixed: int | None = None

    def padded(self, rows: int) -> int:
        """The row count of a buffer that holds `rows` rows: at least one multiple."""
        step = self.fixed or self.multiple
        return max(step, -(-rows // step) * step)


def linear_into(out: Tensor, x: Tensor, weight: Tensor, rule: RowRule) -> Tensor:
    """out [T, O] = x [T, K] · weight [O, K]ᵀ, T a multiple of the rule's step."""
    return product_into(out, x, weight.t(), rule)


def product_into(out: Tensor, a: Tensor, b: Tensor, rule: RowRule, *, add: bool = False) -> Tensor:
    """out [M, O] = (out +) a [M, K] · b [K, O]; M is a multiple of the rule's step."""
    if rule.fixed is None:
        return out.addmm_(a, b) if add else torch.mm(a, b, out=out)
    for piece, rows in zip(torch.split(a, rule.fixed), torch.split(out, rule.fixed), strict=True):
        result = torch.mm(
            piece.clone(memory_format=torch.contiguous_format), b.clone(memory_format=torch.preserve_format)
        )
        rows.copy_(rows + result if add else result)
    return out


def batch_product(a: Tensor, b: Tensor, rule: RowRule) -> Tensor:
    """[C, M, K] · [C, K, O] → [C, M, O], each batch item with the bits that `product_into` gives."""
    if rule.fixed is None:
        return torch.bmm(a, b)
    out = a.new_empty(a.shape[0], a.shape[1], b.shape[2])
    for i in range(a.shape[0]):
        product_into(out[i], a[i], b[i], rule)
    return out


def batch_product_add(out: Tensor, a: Tensor, b: Tensor, rule: RowRule) -> Tensor:
    """out [C, M, O] += [C, M, K] · [C, K, O], each batch item with the bits of `product_into(add=True)`."""
    if rule.fixed is None:
        return out.baddbmm_(a, b)
    for i in range(a.shape[0]):
        product_into(out[i], a[i], b[i], rule, add=True)
    return out


def pad_rows(x: Tensor, rule: RowRule) -> Tensor:
    """x with zero rows added up to the rule's step; x itself where none are needed."""
    missing = rule.padded(x.shape[0]) - x.shape[0]
    return functional.pad(x, (0, 0, 0, missing)) if missing else x
