"""Root mean square norm as Gemma 3 stores it."""

import torch
from torch import Tensor, nn

from workers.engine.kernels.rms_norm import rms_norm


class OnePlusRMSNorm(nn.Module):
    """x [..., K] → x / rms(x) · (1 + weight). The sum 1 + weight is taken once, when the weights are loaded."""

    scale: Tensor

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def loaded(self) -> None:
        """Called once when every weight is in place."""
        self.scale = 1.0 + self.weight

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.scale, self.eps)
