"""Starts Triton kernels at the cost of a call: a kernel is bound once for each of its variants.

Triton studies every argument of every call to find the variant that was compiled for it, which takes the host longer
than a small kernel takes the GPU. Here a variant is known by what the source and the model fix: constants and types.
Later calls go straight to its launcher, with addresses for tensors: to a tensor the launcher would ask the driver where
it lies. That holds because nothing else may choose a variant: run-time integers are not specialized, and pointers are
aligned, which is checked unless the kernel asks for none (`do_not_specialize_on_alignment`).
"""

from collections.abc import Hashable
from typing import Any, NamedTuple

import triton
from torch import Tensor

_ALIGNMENT = 16  # bytes; what Triton compiles for where a pointer has it


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. Triton's own, made for kernels, costs a host call more than the rest of it."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest one that is n or more, for n from 1 on."""
    return 1 << (n - 1).bit_length()


class Parameter(NamedTuple):
    """What of an argument chooses the variant: a constant its value, anything else its type."""

    is_constant: bool
    is_aligned: bool


class Bound(NamedTuple):
    """A compiled variant. `launcher` is Triton's C function; rest: the constants that calls give by name."""

    compiled: Any
    launcher: Any
    function: int
    metadata: Any
    cooperative: bool
    dependent: bool
    rest: tuple[Any, ...]


_parameters: dict[Any, tuple[Parameter, ...]] = {}
_bound: dict[Hashable, Bound] = {}


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
    chosen, values = variant_of(kernel, args)
    variant = (kernel.fn, device, *chosen, *named.values())
    bound = _bound.get(variant)
    if bound is None:
        _bound[variant] = _bind(kernel, kernel[grid](*args, **named), args, named)
        return
    stream = driver.get_current_stream(device)
    x, y, z = (*grid, 1, 1)[:3]
    hooks = triton.knobs.runtime
    enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
    if enter.calls or leave.calls:  # a profiler's
        told = bound.compiled.launch_metadata(grid, stream, *args, *bound.rest)
        bound.compiled.run(x, y, z, stream, bound.function, bound.metadata, told, enter, leave, *args, *bound.rest)
        return
    bound.launcher(
        x, y, z, stream, bound.function, bound.cooperative, bound.dependent, None, None, bound.metadata, None, None,
        None, *values, *bound.rest,
    )  # fmt: skip


def variant_of(kernel: Any, args: tuple[Any, ...]) -> tuple[list[Hashable], list[Any]]:
    """(what the arguments fix of the variant, the arguments with addresses for tensors).

    ValueError for a tensor that is not aligned to 16 bytes where the kernel takes it for aligned.
    """
    parameters = _parameters.get(kernel.fn)
    if parameters is None:
        parameters = _parameters[kernel.fn] = tuple(
            Parameter(bool(p.is_constexpr), not p.do_not_specialize_on_alignment) for p in kernel.params
        )
    variant: list[Hashable] = []
    values: list[Any] = []
    for arg, (is_constant, is_aligned) in zip(args, parameters, strict=False):
        if is_constant:
            variant.append(arg)
            values.append(arg)
        elif isinstance(arg, Tensor):
            address = arg.data_ptr()
            if is_aligned and address % _ALIGNMENT:
                raise ValueError(f"{kernel.arg_names[len(values)]} is not aligned to {_ALIGNMENT} bytes")
            variant.append(arg.dtype)
            values.append(address)
        else:
            variant.append(arg.__class__)
            values.append(arg)
    return variant, values


def _bind(kernel: Any, compiled: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Bound:
    """A variant that has just run for the first time, which loaded it.

    ValueError for one that wants memory of its own at each launch. None of ours does, and later calls give none.
    """
    run = compiled.run
    if run.global_scratch_size or run.profile_scratch_size:
        raise ValueError(f"{kernel.__name__} wants scratch memory at each launch")
    return Bound(
        compiled=compiled,
        launcher=run.launch,
        function=compiled.function,
        metadata=compiled.packed_metadata,
        cooperative=run.launch_cooperative_grid,
        dependent=run.launch_pdl,
        rest=tuple(named[name] for name in kernel.arg_names[len(args) :]),
    )
