"""The library's fp8 product, in the two forms whose rows keep their bits.

Measured on Hopper (torch 2.11.0, CUDA 13.0): from 16 rows on, a row's bits do not depend on the number of rows, with
one scale for each operand as with one for each row, as long as sums are not accumulated the fast way. Other cards need
the same sweep before they may claim it.
"""

import torch
from torch import Tensor
from torch.nn import functional

MULTIPLE = 16
"""The library takes K and O in multiples of this; below this many rows it may sum in another order."""


def scaled_product(codes: Tensor, weight: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """codes [T, K] · weight [O, K]ᵀ · scale_a · scale_b → bf16 [T, O]; codes e4m3, K and O multiples of `MULTIPLE`.

    scale_a, scale_b: float32 [1] and [1], or [T] and [O]. Rows are added up to the next multiple and cut off again.
    """
    rows = codes.shape[0]
    missing = -rows % MULTIPLE
    if missing:
        codes = functional.pad(codes.view(torch.uint8), (0, 0, 0, missing)).view(codes.dtype)
    if scale_b.shape[0] > 1:
        scale_a = (functional.pad(scale_a, (0, missing)) if missing else scale_a).unsqueeze(1)
        scale_b = scale_b.unsqueeze(0)
    out = torch._scaled_mm(
        codes, weight.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=False
    )
    return out[:rows]
