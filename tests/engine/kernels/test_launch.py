"""What of a call chooses a kernel's variant, and what its launcher is given. Starting one needs a card (tests/gpu)."""

from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from workers.engine.kernels.launch import _bind, cdiv, next_power_of_2, variant_of


def _kernel(x, scale, rows, EPS: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    pass


kernel = JITFunction(_kernel, do_not_specialize=["rows"], do_not_specialize_on_alignment=["scale"])
X, SCALE = torch.zeros(8, dtype=torch.bfloat16), torch.zeros(4)


def variant(*args: object) -> tuple[object, ...]:
    return tuple(variant_of(kernel, args)[0])


def test_types_and_constants_choose_the_variant_and_numbers_do_not() -> None:
    first = variant(X, SCALE, 5, 1e-6, "float")
    assert first == variant(torch.ones(3, dtype=torch.bfloat16), torch.ones(7), 2000, 1e-6, "float")
    assert hash(first) == hash(variant(X, SCALE, 6, 1e-6, "float"))
    others = [
        (X.float(), SCALE, 5, 1e-6, "float"),
        (X, SCALE.double(), 5, 1e-6, "float"),
        (X, None, 5, 1e-6, "float"),
        (X, SCALE, 5, 1e-5, "float"),
        (X, SCALE, 5, 1e-6, "fp8_row"),
        (X, SCALE, 5.0, 1e-6, "float"),
    ]
    assert len({first, *(variant(*args) for args in others)}) == 1 + len(others)


def test_the_launcher_is_given_addresses() -> None:
    values = variant_of(kernel, (X, None, 5, 1e-6, "float"))[1]
    assert values == [X.data_ptr(), None, 5, 1e-6, "float"]


def test_a_tensor_is_aligned_where_its_kernel_takes_it_for_so() -> None:
    variant(X, SCALE[1:], 5, 1e-6, "float")
    with pytest.raises(ValueError, match="x is not aligned to 16 bytes"):
        variant(X[1:], SCALE, 5, 1e-6, "float")


@pytest.mark.parametrize("wanted", ["global_scratch_size", "profile_scratch_size"])
def test_a_kernel_that_wants_memory_at_each_launch_is_refused(wanted: str) -> None:
    run = SimpleNamespace(**{"global_scratch_size": 0, "profile_scratch_size": 0, wanted: 128})
    with pytest.raises(ValueError, match="_kernel wants scratch memory"):
        _bind(kernel, SimpleNamespace(run=run), (X, SCALE, 5, 1e-6, "float"), {})


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 16, 17, 3840, 2**20, 2**20 + 1])
def test_host_arithmetic_is_triton_s(n: int) -> None:
    assert next_power_of_2(n) == triton.next_power_of_2(n)
    assert [cdiv(n, d) for d in (1, 3, 16)] == [triton.cdiv(n, d) for d in (1, 3, 16)]
