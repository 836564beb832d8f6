"""encode: rows that are there already, as the next linear wants them."""

from torch import Tensor

from workers.engine.kernels import dispatch
from workers.engine.kernels.encode import cpu
from workers.engine.kernels.encoding import Activation, Encoding

__all__ = ["encode"]


def encode(y: Tensor, encoding: Encoding) -> Activation:
    """y [T, K] float32 or bf16 → the same rows in `encoding`. On the CPU the kind `float` alone.

    Codes and scales are bit for bit those of `quant.rounding` on the CPU: quotients are rounded as IEEE 754 wants it,
    codes to nearest with ties to even. The scale of `fp8_stream` is taken over all T rows, padding among them. NaN
    stays NaN in e4m3 and in a scale; in int8 it has no code.
    """
    if dispatch.on_gpu(y):
        from workers.engine.kernels.encode import kernel

        return kernel.encode(y, encoding)
    return cpu.encode(y, encoding)
