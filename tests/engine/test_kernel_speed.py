"""`benchmarks.kernel_speed` on a tiny model under the interpreter: every row passes its check and is timed."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import kernel_speed
from benchmarks.ceilings import (
    LIBRARY,
    Ceilings,
    Timer,
    check_product,
    draw,
    library_seconds,
    measure_ceilings,
    model_products,
    product_flops,
)
from benchmarks.job_speed import DEFAULT_JOBS
from benchmarks.kernel_speed import Bench
from benchmarks.passes import job_pass, row_positions, synthetic_pass
from benchmarks.shapes import FULL, MODELS, SLIDING, cut_layers

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the script itself is run")

TINY = cut_layers(
    MODELS["gemma-4-12b"].text
    | {
        "hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "global_head_dim": 32, "num_attention_heads": 4,
        "num_key_value_heads": 2, "sliding_window": 16, "vocab_size": 256,
    },
    7,
)  # fmt: skip
CEILINGS = Ceilings(copy=1e12, fp8=1e15, bf16=5e14)


@pytest.fixture
def bench() -> Bench:
    return Bench(TINY, Timer(torch.device("cpu"), repeats=1), CEILINGS)


def test_the_products_of_the_12b_are_those_of_its_linears() -> None:
    products = model_products(MODELS["gemma-4-12b"].text)
    assert len(products) == 4 * 48
    assert {(p.k, p.o) for p in products} == {
        (3840, 8192), (3840, 8704), (4096, 3840), (8192, 3840), (3840, 30_720), (15_360, 3840),
    }  # fmt: skip
    assert round(product_flops(products, 1) / 1e9, 1) == 21.8


def test_every_streaming_kernel_attention_and_head_pass_their_checks(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = small_pass()
    total = bench.report(bench.streams(12)) + bench.report(bench.attention(packed)) + bench.report(bench.head(16))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10
    assert not [line for line in lines if "FAILED" in line]
    assert total == pytest.approx(sum(float(line.split()[-1]) for line in lines), abs=0.1)


def small_pass() -> kernel_speed.PackedPass:
    """Two contents of 24 tokens under questions of 5."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.passes._CONTENT", 24)
        patch.setattr("benchmarks.passes._QUESTIONS", 3)
        patch.setattr("benchmarks.passes._QUESTION", 5)
        return synthetic_pass(64)


def test_a_wrong_kernel_is_told_in_its_row_and_the_others_go_on(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = list(bench.head(16)) * 2
    rows[0] = replace(rows[0], check=lambda: check_product("x", *wrong_product(), fast=False))
    with pytest.raises(SystemExit):
        bench.report(iter(rows))

    def fail() -> None:
        raise AssertionError("row 3 is off")

    rows[0] = replace(rows[0], check=fail)
    bench.report(iter(rows))
    out = capsys.readouterr().out.splitlines()
    assert "FAILED: AssertionError: row 3 is off" in out[-2]
    assert "FAILED" not in out[-1]


def wrong_product() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    cpu = torch.device("cpu")
    x, weight = draw(cpu, 8, 32), draw(cpu, 4, 32, seed=1)
    return (x @ weight.t()) * 1.01, x, weight, 1.0


def test_ceilings_are_of_products_found_right() -> None:
    timer = Timer(torch.device("cpu"), repeats=1)
    measured = measure_ceilings(timer, size=1 << 20, square=64)
    assert min(measured.copy, measured.fp8, measured.bf16) > 0
    seconds = library_seconds(timer, model_products(TINY), 32, [LIBRARY[1], LIBRARY[4]], repeats=1)
    assert set(seconds) == {"fp8", "bf16"}
    assert min(seconds.values()) > 0


def test_int8_and_bf16_linears_pass_their_checks(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.text = TINY | {"num_hidden_layers": 1, "layer_types": [FULL]}
    bench.report(bench.linears(32))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 12
    assert not [line for line in lines if "FAILED" in line]


def test_the_synthetic_pass_is_full_and_of_the_described_shape() -> None:
    packed = synthetic_pass(16_384)
    assert 16_384 - 12 <= len(packed.tokens) <= 16_384
    assert row_positions(packed).max() == 512 + 12 - 1
    assert len(packed.entry_cols) == 2 * len(packed.read_rows)
    assert (np.diff(packed.read_rows) > 0).all()


def test_a_pass_of_the_job_set_is_full(demo_snapshot: Path) -> None:
    packed = job_pass(demo_snapshot, DEFAULT_JOBS, 4096)
    assert 0.9 * 4096 < len(packed.tokens) <= 4096
    assert len({share.key for share in packed.shares}) > 1


def test_layer_types_have_their_own_heads(bench: Bench) -> None:
    assert (bench.layout(SLIDING).num_kv_heads, bench.layout(FULL).num_kv_heads) == (2, 1)
    assert bench.layout(FULL).shared_kv
