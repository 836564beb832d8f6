"""What the linear layers of all schemes share: rows quantized part by part, the plain form, and the form on a GPU."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from workers.engine.kernels import dispatch
from workers.engine.kernels.encoding import Activation, Encoding, Kind
from workers.engine.kernels.linear import coded_linear, linear
from workers.engine.kernels.products import RowRule

Blocks = Callable[[], Iterator[tuple[int, Tensor]]]
"""(first row, float32 rows [n, K]) of one checkpoint tensor, in order, where the weight lies. May be called again."""

_CHUNK = 1024  # rows of the weight turned to float32 at a time


class QuantLinear(nn.Module, ABC):
    """x [T, K] → [T, O] with the weight in a scheme's codes.

    parts         rows of each checkpoint tensor that lies in the weight, top to bottom
    weight        [O, K] codes
    weight_scale  [O] float32: a row is codes · scale. A scheme with one scale per tensor repeats it over its rows
    dtype         of x on the CPU
    pending       [parts] float32, what the parts of the result on a GPU still have to be multiplied by; None: nothing

    On the CPU `forward` is the scheme's definition in float32: activations are rounded as the scheme rounds them, the
    product runs over the codes, scales come last. On a GPU it takes codes, as `encoding` says. Row-invariant where the
    scheme is.
    """

    kind: ClassVar[Kind]
    weight_scale: Tensor
    pending: Tensor | None
    output_scale: Tensor | None

    def __init__(self, in_features: int, parts: Sequence[int], codes: torch.dtype, dtype: torch.dtype) -> None:
        super().__init__()
        self.parts, self.dtype = tuple(parts), dtype
        self.weight = nn.Parameter(torch.empty(sum(parts), in_features, dtype=codes), requires_grad=False)
        self.register_buffer("weight_scale", torch.empty(sum(parts), dtype=torch.float32))
        self.register_buffer("pending", None)
        self.register_buffer("output_scale", None)

    @property
    def on_gpu(self) -> bool:
        """Whether the products run on codes."""
        return dispatch.on_gpu(self.weight)

    @property
    def encoding(self) -> Encoding:
        """How the input is wanted: on the CPU as it is."""
        if not self.on_gpu:
            return Encoding("float", self.dtype)
        return Encoding(self.kind, torch.bfloat16 if self.kind == "float" else self.weight.dtype)

    def rows_of(self, part: int) -> slice:
        """Where a part lies in the weight."""
        first = sum(self.parts[:part])
        return slice(first, first + self.parts[part])

    @abstractmethod
    def put(self, part: int, blocks: Blocks) -> None:
        """Quantize one part from float32 rows. ValueError where a value is not finite."""

    @abstractmethod
    def quantize_input(self, x: Tensor, part: int) -> tuple[Tensor, Tensor]:
        """(x rounded to the scheme's codes, as float32; its scale, [1] or [T, 1]) for the product with one part."""

    def loaded(self) -> None:
        """Called once when every part is in place: what the products on a GPU multiply by is made here."""
        self.output_scale = self.weight_scale

    def product(self, codes: Tensor, weight: Tensor, rule: RowRule) -> Tensor:
        """codes [T, K] · weight [O', K]ᵀ in float32, weight as codes."""
        return torch.cat([linear(codes, rows.float(), rule) for rows in torch.split(weight, _CHUNK)], dim=1)

    def forward(self, x: Activation, rule: RowRule) -> Tensor:
        """x [T, K] → [T, O]: on the CPU in the type of x, on a GPU, where x is in its `encoding`, in bf16."""
        if self.on_gpu:
            assert self.output_scale is not None
            return coded_linear(x, self.weight, self.output_scale)
        assert isinstance(x, Tensor)
        dtype, x, out = x.dtype, x.float(), []
        for part in range(len(self.parts)):
            rows = self.rows_of(part)
            codes, scale = self.quantize_input(x, part)
            out.append(self.product(codes, self.weight[rows], rule) * scale * self.weight_scale[rows])
        return torch.cat(out, dim=1).to(dtype)
