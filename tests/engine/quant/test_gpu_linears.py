"""The linears as a GPU runs them, on the CPU: codes in, bf16 out, what is left pending, what is refused."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import PropertyMock, patch

import pytest
import torch
from torch import Tensor

from tests.engine.quant.support import exported, scheme_model
from tests.engine.quant.test_schemes import in_blocks
from tests.support.triton_interpreter import has_device
from workers.engine import weights as loader
from workers.engine.errors import LoadError
from workers.engine.kernels.encoding import Activation, Codes
from workers.engine.kernels.products import RowRule
from workers.engine.layers.linear import Linear
from workers.engine.quant import SCHEMES, Fp8Linear, QuantLinear, make_linear, reference
from workers.engine.schemes import check_input_scales, quant_linears
from workers.engine.shards import Snapshot

RULE = RowRule()
IN, PARTS = 96, (32, 16, 48)
KINDS = {"fp8s": "fp8_static", "fp8": "fp8_stream", "fp8row": "fp8_row", "w8a16": "float", "w8a8": "int8_row"}


def scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, **_options: Any) -> Tensor:
    """The library's product with its rules for a GPU; on the CPU it knows no scale per row."""
    assert a.dtype == b.dtype == torch.float8_e4m3fn
    assert a.is_contiguous()
    assert b.t().is_contiguous()
    assert a.shape[0] % 16 == 0
    assert a.shape[1] % 16 == 0
    assert b.shape[1] % 16 == 0
    assert scale_a.dtype == scale_b.dtype == torch.float32
    one = scale_a.numel() == scale_b.numel() == 1
    assert one or (scale_a.shape == (len(a), 1) and scale_b.shape == (1, b.shape[1]))
    assert scale_a.is_contiguous()
    assert scale_b.is_contiguous()
    assert _options == {"out_dtype": torch.bfloat16, "use_fast_accum": False}
    return (a.float() @ b.float() * scale_a * scale_b).bfloat16()


@pytest.fixture
def gpu() -> Iterator[None]:
    with (
        patch.object(QuantLinear, "on_gpu", PropertyMock(return_value=True)),
        patch.object(torch, "_scaled_mm", scaled_mm),
    ):
        yield


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def filled(scheme: str, parts: tuple[int, ...] = PARTS) -> QuantLinear:
    """Every part has values of another size."""
    module = make_linear(scheme, IN, parts)
    for part, rows in enumerate(draw(sum(parts), IN, seed=1).split(parts)):
        module.put(part, in_blocks(rows * 3**part, 7))
    if isinstance(module, Fp8Linear) and module.static:
        module.input_scales.fill_(0.0625)
        module.share_input()
    module.loaded()
    return module


def given(module: QuantLinear, x: Tensor) -> Activation:
    """x as the module wants it."""
    encoding = module.encoding
    if encoding.kind == "float":
        return x.to(encoding.dtype)
    rounded, scale = module.quantize_input(x, 0)
    return Codes(rounded.to(encoding.dtype), scale.reshape(-1))


@pytest.mark.skipif(has_device(), reason="kernels run on the device, not interpreted")
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("parts", [PARTS, (48,)], ids=["fused", "single"])
@pytest.mark.parametrize("rows", [1, 16, 37])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_linear_is_the_reference(scheme: str, rows: int, parts: tuple[int, ...]) -> None:
    module, x = filled(scheme, parts), draw(rows, IN, seed=rows)
    out = module(given(module, x), RULE)
    assert out.dtype == torch.bfloat16
    assert (module.pending is not None) == (scheme in ("fp8s", "fp8") and len(parts) > 1)
    out = out.float()
    if module.pending is not None:
        assert module.pending.shape == (len(parts),)
        out *= module.pending.repeat_interleave(torch.tensor(parts))
    weight = torch.cat([rows * 3**part for part, rows in enumerate(draw(sum(parts), IN, seed=1).split(parts))])
    fixed = torch.full((len(parts),), 0.0625) if scheme == "fp8s" else None
    expected = reference.linear(scheme, x, weight, parts, fixed)
    assert ((out - expected).abs() <= expected.abs() * 2**-8 + expected.abs().max() * 2e-6).all()


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_encoding(scheme: str) -> None:
    encoding = filled(scheme).encoding
    assert encoding.kind == KINDS[scheme]
    codes = {"w8a16": torch.bfloat16, "w8a8": torch.int8}
    assert encoding.dtype == codes.get(scheme, torch.float8_e4m3fn)
    assert (encoding.scale is not None) == (scheme == "fp8s")
    if encoding.scale is not None:
        assert encoding.scale.tolist() == [0.0625]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_cpu_takes_numbers_as_they_are(scheme: str) -> None:
    assert filled(scheme).encoding.kind == "float"
    assert make_linear(scheme, IN, PARTS, torch.bfloat16).encoding.dtype == torch.bfloat16
    plain = Linear(IN, *PARTS, dtype=torch.bfloat16)
    assert (plain.encoding.kind, plain.encoding.dtype, plain.pending) == ("float", torch.bfloat16, None)


def test_parts_with_different_input_scales_are_refused_on_a_gpu(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """`exported` gives every linear another one. On the CPU each part rounds its own input."""
    snapshot, _ = exported(tiny_checkpoint, tmp_path / "fp8s")
    model = scheme_model(snapshot, "fp8s")
    with (
        patch.object(QuantLinear, "on_gpu", PropertyMock(return_value=True)),
        pytest.raises(LoadError, match=r"model\.layers\.0\.self_attn\.qkv_proj has the input scales 0\.\d+, 0\.\d+"),
    ):
        check_input_scales(model)


def test_equal_input_scales_are_shared(tiny_checkpoint: Path, tmp_path: Path) -> None:
    snapshot, _ = exported(tiny_checkpoint, tmp_path / "fp8s")
    model = scheme_model(snapshot, "fp8s")
    linears = quant_linears(model).values()
    for linear in linears:
        linear.input_scales.fill_(0.5)
    with patch.object(QuantLinear, "on_gpu", PropertyMock(return_value=True)):
        check_input_scales(model)
        for linear in linears:
            scale = linear.encoding.scale
            assert scale is not None
            assert scale.tolist() == [0.5]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("scheme", ["fp8", "fp8row", "w8a16", "w8a8"])
def test_a_loaded_model_is_ready(tiny_checkpoint: Path, scheme: str) -> None:
    """`load_weights` prepares what a GPU multiplies by: nothing else has to be called."""
    for linear in quant_linears(scheme_model(tiny_checkpoint, scheme)).values():
        several = scheme == "fp8" and len(linear.parts) > 1
        assert linear.output_scale is not None
        assert linear.output_scale.shape == ((1,) if scheme == "fp8" else linear.weight_scale.shape)
        assert (linear.pending is not None) == several


def test_a_tensor_kept_on_a_device_comes_in_the_same_blocks(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is read once, however often it is gone through."""
    monkeypatch.setattr("workers.engine.shards.BLOCK_BYTES", 4096)
    with Snapshot(tiny_checkpoint) as snapshot:
        tensor = snapshot.tensors["model.layers.0.mlp.down_proj.weight"]
        plain = [(first, rows.clone()) for first, rows in loader.float_blocks(tensor, None)()]
        monkeypatch.setattr(loader, "_CPU", torch.device("meta"))
        blocks = loader.float_blocks(tensor, None, torch.device("cpu"))
        monkeypatch.setattr(type(tensor.shard), "read", None)
        assert len(plain) > 1
        for _ in range(2):
            for (first, rows), (at, ours) in zip(plain, blocks(), strict=True):
                assert first == at
                assert torch.equal(rows, ours)
