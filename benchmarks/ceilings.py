"""What the card can do: copies, library products, and the products of a whole model one after the other.

Letters: T rows, K input width, O output width.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.probes import event_seconds
from benchmarks.random_checkpoint import linears
from benchmarks.shapes import Json

E4M3 = torch.float8_e4m3fn
_SQUARE = 8192
_CHECK_ROWS, _CHECK_COLUMNS = 32, 256


class Product(NamedTuple):
    """One fused linear of a layer."""

    name: str
    k: int
    o: int


def layer_products(text: Json, layer: int) -> list[Product]:
    """q, k and v as one product, gate and up as one."""
    shapes = linears(text, layer)
    width = sum(o for name, (o, _) in shapes.items() if name.endswith(("q_proj", "k_proj", "v_proj")))
    o_proj, gate, down = shapes["self_attn.o_proj"], shapes["mlp.gate_proj"], shapes["mlp.down_proj"]
    return [
        Product("qkv_proj" if "self_attn.v_proj" in shapes else "qk_proj", text["hidden_size"], width),
        Product("o_proj", o_proj[1], o_proj[0]),
        Product("gate_up_proj", gate[1], 2 * gate[0]),
        Product("down_proj", down[1], down[0]),
    ]


def model_products(text: Json) -> list[Product]:
    """All of them, in the order in which they run."""
    return [product for layer in range(text["num_hidden_layers"]) for product in layer_products(text, layer)]


class Timer:
    """Median seconds of a call: by events on a GPU, by the clock on a CPU."""

    def __init__(self, device: torch.device, repeats: int = 10) -> None:
        self.device, self.repeats = device, repeats

    def seconds(self, run: Callable[[], object], repeats: int | None = None, warm: int = 3) -> float:
        """`repeats` instead of the timer's own, for calls that take long."""
        repeats = repeats or self.repeats
        if self.device.type == "cuda":
            return event_seconds(run, repeats, warm)
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            run()
            times.append(time.perf_counter() - started)
        return float(np.median(times))


def draw(device: torch.device, *shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal numbers; as codes they fill most of the range, as quantized normal values do."""
    generator = torch.Generator(device).manual_seed(seed)
    values = torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)
    if dtype == torch.int8:
        return values.mul_(28).round_().clamp_(-127, 127).to(dtype)
    return values.mul_(100).clamp_(-448, 448).to(dtype) if dtype == E4M3 else values.to(dtype)


@dataclass(frozen=True, slots=True)
class LibraryProduct:
    """A library product of x [T, K] and weight [O, K] of `dtype`, with one scale each or one a row and channel."""

    name: str
    dtype: torch.dtype
    by_row: bool
    fast: bool

    def run(self, x: Tensor, weight: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
        """bf16 [T, O]."""
        if self.dtype == torch.bfloat16:
            return x @ weight.t()
        return torch._scaled_mm(
            x, weight.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=self.fast
        )

    def scales(self, rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Of x and of the weight."""
        shapes = ((rows, 1), (1, columns)) if self.by_row else ((1,), (1,))
        return tuple(torch.full(shape, 2.0**-6, device=device) for shape in shapes)  # type: ignore[return-value]


LIBRARY = (
    LibraryProduct("fp8, fast accumulation", E4M3, False, True),
    LibraryProduct("fp8", E4M3, False, False),
    LibraryProduct("fp8 by row, fast accumulation", E4M3, True, True),
    LibraryProduct("fp8 by row", E4M3, True, False),
    LibraryProduct("bf16", torch.bfloat16, False, False),
)


def check_product(name: str, out: Tensor, x: Tensor, weight: Tensor, factor: float | Tensor, *, fast: bool) -> None:
    """SystemExit where the first rows and columns of out [T, O] are not x · weightᵀ · factor, rounded to bf16.

    A sum's rounding to bf16 is 2^-9 of it at most; fast accumulation keeps some 14 bits of partial sums.
    """
    rows, columns = min(_CHECK_ROWS, out.shape[0]), min(_CHECK_COLUMNS, out.shape[1])
    expected = (x[:rows].double() @ weight[:columns].double().t()) * factor
    off = float((out[:rows, :columns].double() - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt())
    if not off <= (2e-2 if fast else 2.0**-8):
        raise SystemExit(f"NOT PRINTED: {name} is off by {off:.1e}")


@dataclass(frozen=True, slots=True)
class Ceilings:
    """copy: bytes per second, read and written; fp8, bf16: FLOP per second of a large library product."""

    copy: float
    fp8: float
    bf16: float


def measure_ceilings(timer: Timer, *, size: int = 2 << 30, square: int = _SQUARE) -> Ceilings:
    """A copy of `size` bytes, and square products."""
    device = timer.device
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = 2 * size / timer.seconds(lambda: target.copy_(source))
    rates = {}
    for kind in (LIBRARY[1], LIBRARY[4]):
        x, weight = (draw(device, square, square, seed=seed, dtype=kind.dtype) for seed in (1, 2))
        scales = kind.scales(square, square, device)
        check_product(kind.name, kind.run(x, weight, *scales), x, weight, _factor(kind), fast=False)
        rates[kind.name] = 2 * square**3 / timer.seconds(lambda k=kind, a=x, b=weight, s=scales: k.run(a, b, *s))
    return Ceilings(copy, rates["fp8"], rates["bf16"])


def _factor(kind: LibraryProduct) -> float:
    return 1.0 if kind.dtype == torch.bfloat16 else 2.0**-12


def library_seconds(
    timer: Timer, products: Sequence[Product], rows: int, kinds: Sequence[LibraryProduct], repeats: int = 3
) -> dict[str, float]:
    """Seconds of all products of a model one after the other, each with a weight of its own, for each kind of product.

    This is the ceiling that a forward is held against: nothing but the library runs, as long as a real pass would.
    """
    out: dict[str, float] = {}
    for dtype in dict.fromkeys(kind.dtype for kind in kinds):
        operands = _Operands(timer.device, products, rows, dtype)
        for kind in (kind for kind in kinds if kind.dtype == dtype):
            out[kind.name] = timer.seconds(operands.prepared(kind), repeats, warm=1)
    return out


class _Operands:
    """Inputs of every width, and a weight of its own for every product."""

    def __init__(self, device: torch.device, products: Sequence[Product], rows: int, dtype: torch.dtype) -> None:
        self.device, self.products, self.rows = device, products, rows
        self.inputs = {k: draw(device, rows, k, seed=k, dtype=dtype) for k in {product.k for product in products}}
        self.masters = {(k, o): draw(device, o, k, seed=o, dtype=dtype) for k, o in {(p.k, p.o) for p in products}}
        self.weights = [self.masters[p.k, p.o].clone() for p in products]

    def prepared(self, kind: LibraryProduct) -> Callable[[], None]:
        """All products of a kind, once each shape's was found right."""
        scales = {shape: kind.scales(self.rows, shape[1], self.device) for shape in self.masters}
        for (k, o), weight in self.masters.items():
            result = kind.run(self.inputs[k], weight, *scales[k, o])
            check_product(kind.name, result, self.inputs[k], weight, _factor(kind), fast=kind.fast)

        def run() -> None:
            for product, weight in zip(self.products, self.weights, strict=True):
                kind.run(self.inputs[product.k], weight, *scales[product.k, product.o])

        return run


def product_flops(products: Sequence[Product], rows: int) -> float:
    """Two for each weight and row."""
    return 2.0 * rows * sum(product.k * product.o for product in products)
