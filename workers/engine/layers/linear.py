"""A linear map without bias; several checkpoint tensors may lie fused in its rows."""

import torch
from torch import Tensor, nn

from workers.engine.kernels.encoding import Activation, Encoding
from workers.engine.kernels.linear import linear
from workers.engine.kernels.products import RowRule


class Linear(nn.Module):
    """x [T, K] → x · weightᵀ [T, O], both of `dtype`.

    parts    rows of each checkpoint tensor that lies in the weight, top to bottom
    pending  what the parts of the result still have to be multiplied by: nothing, see `quant.QuantLinear`
    """

    pending: Tensor | None = None

    def __init__(self, in_features: int, *parts: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.parts = parts
        self.weight = nn.Parameter(torch.empty(sum(parts), in_features, dtype=dtype), requires_grad=False)

    @property
    def encoding(self) -> Encoding:
        """How the input is wanted."""
        return Encoding("float", self.weight.dtype)

    def forward(self, x: Activation, rule: RowRule) -> Tensor:
        assert isinstance(x, Tensor)
        return linear(x, self.weight, rule)
