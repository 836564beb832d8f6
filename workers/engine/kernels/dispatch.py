"""Which form of an op runs."""

from torch import Tensor


def on_gpu(tensor: Tensor) -> bool:
    """Whether the op's Triton or library form runs on this tensor, and not the CPU's. Ops ask the module for it."""
    return tensor.is_cuda
