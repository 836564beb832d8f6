"""Starts Triton kernels at the cost of a call: a kernel is bound once for each of its variants.

Triton studies every argument of every call to find the variant that was compiled for it, which takes the host longer
than a small kernel takes the GPU. Here a variant is known by what the source and the model fix: constants and types.
Later calls go straight to it. That holds because nothing else may choose one: run-time integers are not specialized,
and pointers are aligned, which is checked unless the kernel asks for none (`do_not_specialize_on_alignment`).
"""

from collections.abc import Hashable
from typing import Any

import triton
from torch import Tensor

_ALIGNMENT = 16  # bytes; what Triton compiles for where a pointer has it
_bound: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
    """kernel[grid](*args, **named), on the current stream of the current device.

    args   the kernel's parameters in their order; the last ones, if they are constexpr, may be named instead
    named  those, and options: num_warps, num_stages, …
    ValueError for a tensor that is not aligned to 16 bytes.
    """
    if not isinstance(kernel, triton.JITFunction):  # interpreted
        kernel[grid](*args, **named)
        return
    driver = triton.runtime.driver.active
    device = driver.get_current_device()
    key: list[Any] = [kernel.fn, device, *named.values()]
    for arg, parameter in zip(args, kernel.params, strict=False):
        if isinstance(arg, Tensor):
            if arg.data_ptr() % _ALIGNMENT and not parameter.do_not_specialize_on_alignment:
                raise ValueError(f"{parameter.name} is not aligned to {_ALIGNMENT} bytes")
            key.append(arg.dtype)
        else:
            key.append(arg if parameter.is_constexpr else type(arg))
    variant = tuple(key)
    found = _bound.get(variant)
    if found is None:
        compiled = kernel[grid](*args, **named)
        _bound[variant] = compiled, tuple(named[name] for name in kernel.arg_names[len(args) :])
        return
    compiled, rest = found
    enter, leave = _hook(triton.knobs.runtime.launch_enter_hook), _hook(triton.knobs.runtime.launch_exit_hook)
    stream = driver.get_current_stream(device)
    metadata = None if enter is None else compiled.launch_metadata(grid, stream, *args, *rest)
    x, y, z = (*grid, 1, 1)[:3]
    compiled.run(
        x, y, z, stream, compiled.function, compiled.packed_metadata, metadata, enter, leave, *args, *rest
    )  # fmt: skip


def _hook(chain: Any) -> Any:
    """A profiler's hook, or None: an empty chain is called for nothing."""
    return chain if getattr(chain, "calls", True) else None
