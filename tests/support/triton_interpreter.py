"""Triton kernels on a machine without an NVIDIA GPU: Triton's interpreter, with what it gets wrong put right.

Seen in Triton 3.6.0; `tests/engine/kernels/test_interpreter.py` fails where one of these is missing or has been mended:

    dot       a bf16 operand is multiplied as the integer that its bits are
    bf16      float32 to bfloat16 cuts the low bits off, where the card rounds to nearest even; back, it
              loses subnormals; an int8 becomes the number whose bits it is
    e4m3      float32 to fp8e4nv is wrong on some 2 % of values: ties go up, and a carry into the exponent is lost;
              back, NaN becomes 480
    loops     the bound of a loop that was loaded from memory is refused by numpy 2.5
    warnings  numpy warns of overflow and NaN, which on the card are values like others

Products of bf16 elements with `*` (not `tl.dot`) stay wrong: kernels compute in float32.
"""

import ctypes
import functools
import importlib
import os
from importlib.util import find_spec
from typing import Any

import numpy as np

CORRECTED = {"bf16": ("bfloat16", np.uint16), "fp8e4nv": ("float8_e4m3fn", np.uint8)}
"""Triton's name of a type that is converted here → torch's, and the integers that hold its bits."""


def interpret_kernels() -> bool:
    """Interpret this process's kernels if it has Triton and no device to run them on. Call before Triton is loaded.

    The setting stays in this process: children start with the environment they would have had.
    """
    if find_spec("triton") is None or has_device():
        return False
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"  # Triton's own library is decorated while it is imported
    triton = importlib.import_module("triton")
    if before is None:
        del os.environ["TRITON_INTERPRET"]
    triton.knobs.propagate_env = False
    triton.knobs.runtime.interpret = True
    triton.knobs.propagate_env = True
    for correct in (correct_dot, correct_conversions, correct_loops, correct_warnings):
        correct()
    return True


def has_device() -> bool:
    """Whether the NVIDIA driver shows a device, asked without torch: the tests of the base package do not load it."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def _interpreter() -> Any:
    return importlib.import_module("triton.runtime.interpreter")


def correct_dot() -> None:
    """bf16 and e4m3 operands of a dot become float32, which holds them and their products exactly."""
    module = _interpreter()
    plain = module.InterpreterBuilder.create_dot

    def widened(operand: Any) -> Any:
        name = operand.dtype.scalar.name
        return module.TensorHandle(_to_float(operand.data, name), module.tl.float32) if name in CORRECTED else operand

    @functools.wraps(plain)
    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return plain(self, widened(a), widened(b), *rest)

    module.InterpreterBuilder.create_dot = create_dot


def correct_conversions() -> None:
    """float32 to bf16 and e4m3 and back as torch does it. Above 464 it is NaN, on the card 448: kernels clamp first."""
    module = _interpreter()
    for method in ("cast_impl", "create_fp_to_fp"):
        _correct_conversions_of(module, method)


def _correct_conversions_of(module: Any, method: str) -> None:
    plain = getattr(module.InterpreterBuilder, method)

    @functools.wraps(plain)
    def convert(self: Any, src: Any, dst_type: Any, *rest: Any) -> Any:
        source, target = src.dtype.scalar.name, dst_type.scalar.name
        if (source, target) in {("fp32", name) for name in CORRECTED}:
            return module.TensorHandle(_from_float(src.data, target), dst_type.scalar)
        if (source, target) == ("int8", "bf16"):
            return module.TensorHandle(_from_float(src.data, target), dst_type.scalar)
        if (source, target) in {(name, "fp32") for name in CORRECTED}:
            return module.TensorHandle(_to_float(src.data, source), dst_type.scalar)
        return plain(self, src, dst_type, *rest)

    setattr(module.InterpreterBuilder, method, convert)


def correct_loops() -> None:
    """A scalar is an array of one element, which numpy no longer takes for an index."""
    module = _interpreter()
    plain = module._patch_lang_tensor

    @functools.wraps(plain)
    def patch(tensor: Any, scope: Any) -> None:
        plain(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).item()))

    module._patch_lang_tensor = patch


def correct_warnings() -> None:
    """Interpreted arithmetic is as silent as the card's."""
    module = _interpreter()
    plain = module.GridExecutor.__call__

    @functools.wraps(plain)
    def call(self: Any, *arguments: Any, **keywords: Any) -> None:
        with np.errstate(all="ignore"):
            plain(self, *arguments, **keywords)

    module.GridExecutor.__call__ = call


def _from_float(data: Any, name: str) -> Any:
    """Array of numbers that float32 holds → the bits of its elements as torch rounds them."""
    torch, (dtype, bits) = importlib.import_module("torch"), CORRECTED[name]
    values = torch.from_numpy(np.array(data, dtype=np.float32, ndmin=1, order="C"))
    return values.to(getattr(torch, dtype)).view(torch.uint8).numpy().view(bits).reshape(np.shape(data))


def _to_float(data: Any, name: str) -> Any:
    """Bits → float32 array."""
    torch, (dtype, bits) = importlib.import_module("torch"), CORRECTED[name]
    values = torch.from_numpy(np.array(data, dtype=bits, ndmin=1, order="C").view(np.uint8))
    return values.view(getattr(torch, dtype)).float().numpy().reshape(np.shape(data))
