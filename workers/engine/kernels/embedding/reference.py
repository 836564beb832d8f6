"""Row by row."""

import torch
from torch import Tensor


def embedding(tokens: Tensor, weight: Tensor, scale: float) -> Tensor:
    """tokens [T] int64, weight [V, K] → weight[tokens] · scale [T, K] float32."""
    return torch.stack([weight[int(token)].float() * scale for token in tokens])
