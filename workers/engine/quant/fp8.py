"""`fp8s`, `fp8`: e4m3 weights with one scale per checkpoint tensor; e4m3 activations with one scale per pass.

The scale of the activations is calibrated and fixed (`fp8s`), or the largest input of the pass (`fp8`: rows that run
together share it, so the scheme is not batch-invariant). Stored layout: compressed-tensors `float-quantized`.
"""

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from workers.engine.kernels.encoding import Encoding
from workers.engine.quant.linear import Blocks, QuantLinear
from workers.engine.quant.rounding import E4M3, E4M3_MAX, check_finite, scale_for, to_e4m3

WEIGHT, WEIGHT_SCALE, INPUT_SCALE = ".weight", ".weight_scale", ".input_scale"
"""Endings of the stored names of one linear: e4m3 [O, K], float32 [1], float32 [1]."""


def weight_scale(blocks: Blocks) -> Tensor:
    """max|w| / 448 over a tensor, float32 [1]. ValueError where a value is not finite."""
    amax = torch.zeros(1, dtype=torch.float32)
    for _, rows in blocks():
        amax = torch.maximum(amax.to(rows.device), rows.abs().amax())  # maximum keeps a NaN
    check_finite(amax)
    return scale_for(amax, E4M3_MAX)


def quantize(rows: Tensor, scale: Tensor) -> Tensor:
    """float32 rows / scale → e4m3."""
    return to_e4m3(rows / scale)


def unpack(codes: Tensor, scale: Tensor) -> Tensor:
    """e4m3 codes · scale → float32."""
    return codes.float() * scale


def has_nan(codes: Tensor) -> bool:
    """Whether one of the e4m3 codes is one of the two that stand for no number."""
    return bool(((codes.view(torch.uint8) & 0x7F) == 0x7F).any())


def input_scale(amax: float) -> float:
    """The fixed scale for inputs up to amax: 2^ceil(log2(2 · amax / 448)), so that twice the largest seen still fits.

    Exact at powers of two. 1 where only zeros were seen. ValueError unless amax is finite and not negative.
    """
    if not 0 <= amax < math.inf:
        raise ValueError(f"the largest input is {amax}")
    mantissa, exponent = math.frexp(2 * amax / E4M3_MAX)  # mantissa in [0.5, 1): log2 is whole at 0.5 alone
    if mantissa == 0:
        return 1.0
    return math.ldexp(1.0, max(-126, exponent - 1 if mantissa == 0.5 else exponent))


def layout(linear: str, shape: tuple[int, ...]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The stored tensors of one linear [O, K]: name → (safetensors type, shape)."""
    return {
        linear + WEIGHT: ("F8_E4M3", shape),
        linear + WEIGHT_SCALE: ("F32", (1,)),
        linear + INPUT_SCALE: ("F32", (1,)),
    }


def pack(linear: str, blocks: Blocks, scale_of_input: float) -> Iterator[tuple[str, Tensor]]:
    """The stored tensors of one linear as (name, rows), the weight block by block. ValueError as `weight_scale`."""
    scale = weight_scale(blocks)
    yield linear + WEIGHT_SCALE, scale
    yield linear + INPUT_SCALE, torch.tensor([scale_of_input], dtype=torch.float32)
    for _, rows in blocks():
        yield linear + WEIGHT, quantize(rows, scale)


class Fp8Linear(QuantLinear):
    """e4m3 · e4m3. Static: `input_scales` [parts] float32, one per checkpoint tensor, NaN until set.

    On a GPU the parts of a weight share one product, so one input, and one scale for it: `shared_scale` [1], once
    `share_input` has found them equal. Where there are several weight scales they are left `pending`.
    """

    input_scales: Tensor
    shared_scale: Tensor | None

    def __init__(self, in_features: int, parts: Sequence[int], dtype: torch.dtype, *, static: bool) -> None:
        super().__init__(in_features, parts, E4M3, dtype)
        self.static = static
        self.register_buffer("shared_scale", None)
        self._static: Encoding | None = None
        self.register_buffer("input_scales", torch.full((len(self.parts),), math.nan, dtype=torch.float32))

    @property
    def encoding(self) -> Encoding:
        if not self.on_gpu:
            return super().encoding
        if not self.static:
            return Encoding("fp8_stream", E4M3)
        assert self._static is not None
        return self._static

    def loaded(self) -> None:
        scales = self.weight_scale[[self.rows_of(part).start for part in range(len(self.parts))]]
        several = self.on_gpu and len(scales) > 1  # on the CPU `forward` multiplies by every scale
        self.pending = scales if several else None
        self.output_scale = torch.ones_like(scales[:1]) if several else scales

    def share_input(self) -> None:
        """Fix the input's one scale on a GPU. ValueError where the parts of the weight have different ones."""
        values = self.input_scales.tolist()
        if len(set(values)) > 1:
            raise ValueError(f"has the input scales {', '.join(map(str, values))}: on a GPU its parts share one input")
        self.shared_scale = self.input_scales[:1].clone()
        self._static = Encoding("fp8_static", E4M3, self.shared_scale)

    def put(self, part: int, blocks: Blocks) -> None:
        scale = weight_scale(blocks)
        first = self.rows_of(part).start
        self.weight_scale[self.rows_of(part)] = scale
        for row, rows in blocks():
            self.weight[first + row : first + row + len(rows)] = quantize(rows, scale)

    def put_stored(self, part: int, blocks: Iterable[tuple[int, Tensor]], scale: Tensor) -> None:
        """Copy codes as they are stored: `blocks` are (first row, e4m3 rows)."""
        first = self.rows_of(part).start
        self.weight_scale[self.rows_of(part)] = scale
        for row, codes in blocks:
            self.weight[first + row : first + row + len(codes)] = codes

    def quantize_input(self, x: Tensor, part: int) -> tuple[Tensor, Tensor]:
        scale = self.input_scales[part] if self.static else scale_for(x.abs().amax(), E4M3_MAX)
        return quantize(x, scale).float(), scale
