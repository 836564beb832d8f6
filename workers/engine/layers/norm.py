"""Root mean square norm as Gemma stores it."""

import torch
from torch import Tensor, nn

from workers.engine.kernels.rms_norm import rms_norm


class RMSNorm(nn.Module):
    """x [..., K] → x / rms(x) · (offset + weight). The sum is taken once, when the weights are loaded."""

    scale: Tensor

    def __init__(self, size: int, eps: float, offset: float) -> None:
        """offset: 1 in Gemma 3, 0 in Gemma 4."""
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def loaded(self) -> None:
        """Called once when every weight is in place."""
        self.scale = self.offset + self.weight

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.scale, self.eps)
