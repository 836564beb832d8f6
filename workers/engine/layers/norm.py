"""Root mean square norm as Gemma stores it."""

import torch
from torch import Tensor, nn

from workers.engine.kernels.rms_norm import rms_norm


class RMSNorm(nn.Module):
    """x [..., K] → x / rms(x) · (offset + weight), in float32. The sum is taken once, when the weights are loaded."""

    scale: Tensor

    def __init__(self, size: int, eps: float, offset: float, dtype: torch.dtype = torch.float32) -> None:
        """offset: 1 in Gemma 3, 0 in Gemma 4. dtype: what the result is rounded to."""
        super().__init__()
        self.eps, self.offset, self.dtype = eps, offset, dtype
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def loaded(self) -> None:
        """Called once when every weight is in place."""
        self.scale = self.offset + self.weight

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.scale, self.eps, self.dtype)
