"""The start-up check: it passes on this machine, sees a library that fails, and the fixed rule it then picks works."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engine.support import engine_config, make_plan, random_jobs, score, summed
from workers.engine import selfcheck
from workers.engine.engine import ScoringEngine
from workers.engine.kernels import products
from workers.engine.kernels.products import RowRule
from workers.engine.processor import is_intel
from workers.engine.runner import Runner

SHAPES = [(64, 128), (128, 64)]
Into = Callable[..., Tensor]


def check() -> tuple[RowRule, bool]:
    return selfcheck.verify_invariance(SHAPES, 64, [16])


def test_this_machine_needs_no_fixed_pieces() -> None:
    assert check() == (RowRule(), True)


def test_nor_do_the_shapes_of_the_demo() -> None:
    """A long sum, which the library may cut in ways that depend on rows and threads."""
    assert selfcheck.linear_is_invariant(2048, 640, RowRule())


@pytest.mark.skipif(
    not (is_intel() and torch.backends.mkl.is_available()), reason="strict products of MKL are for Intel's processors"
)
def test_nor_does_an_older_processor() -> None:
    """MKL with the instructions of one without AVX-512."""
    code = f"import workers.engine.selfcheck as s; print(s.verify_invariance({SHAPES}, 64, [16]))"
    environment = os.environ | {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "OMP_NUM_THREADS": "2"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == str((RowRule(), True)), run.stderr


@pytest.mark.parametrize(
    ("text", "intel"),
    [
        ("processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: Xeon\n", True),
        ("processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: not GenuineIntel\n", False),
        ("model name\t: no vendor_id\nvendor_id\t: GenuineIntel\n", True),
        ("processor\t: 0\nBogoMIPS\t: 100\n", False),
    ],
)
def test_the_vendor_of_the_processor(tmp_path: Path, text: str, intel: bool) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert is_intel(tmp_path / "cpuinfo") is intel
    assert not is_intel(tmp_path / "none")


def by_row_count(plain: Into, limit: int) -> Into:
    """A product that adds in another order below `limit` rows, as a library does that picks a kernel by row count."""

    def product(out: Tensor, a: Tensor, b: Tensor, rule: RowRule, **options: Any) -> Tensor:
        result = plain(out, a, b, rule, **options)
        if rule.fixed is None and a.shape[0] < limit:
            result.mul_(1 + 2**-20)
        return result

    return product


@pytest.mark.parametrize("limit", [17, 100])
def test_a_linear_that_depends_on_the_row_count(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    plain = products.linear_into
    monkeypatch.setattr(
        selfcheck,
        "linear_into",
        lambda out, x, w, rule: by_row_count(lambda o, a, b, r: plain(o, a, b, r), limit)(out, x, w, rule),
    )
    assert check()[0] == RowRule(64, 64)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_a_linear_that_splits_its_sums_over_the_threads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It fails the free rule. In fixed pieces a row keeps its bits in any company, and the company is what counts."""
    plain = products.linear_into

    def by_threads(out: Tensor, x: Tensor, w: Tensor, rule: RowRule) -> Tensor:
        return plain(out, x, w, rule).mul_(1 + torch.get_num_threads() * 2**-20)

    monkeypatch.setattr(selfcheck, "linear_into", by_threads)
    assert check()[0] == RowRule(64, 64)
    assert "linear: 64 → 128, 64 → 4096, 128 → 64; attention: fine" in caplog.text
    assert selfcheck.linear_is_invariant(64, 128, RowRule(64, 64))


def test_under_the_fixed_rule_company_is_still_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = products.linear_into

    def by_rows(out: Tensor, x: Tensor, w: Tensor, rule: RowRule) -> Tensor:
        return plain(out, x, w, rule).mul_(1 + x.shape[0] * 2**-20)

    monkeypatch.setattr(selfcheck, "linear_into", by_rows)
    assert not selfcheck.linear_is_invariant(64, 128, RowRule(64, 64))


@pytest.mark.parametrize(("turned", "invariant"), [(None, True), (16, False)])
def test_a_bf16_linear_that_sums_in_another_order(
    monkeypatch: pytest.MonkeyPatch, turned: int | None, invariant: bool
) -> None:
    """The same float32 terms added the other way round, rounded to bf16 at the end: ordinary data would hide it."""

    def product(out: Tensor, x: Tensor, w: Tensor, _rule: RowRule) -> Tensor:
        return out.copy_(summed(x, w, backwards=x.shape[0] == turned))

    monkeypatch.setattr(selfcheck, "linear_into", product)
    torch.manual_seed(0)
    assert selfcheck.linear_is_invariant(64, 8, RowRule(), torch.bfloat16) == invariant


def test_bf16_needs_no_fixed_pieces_here() -> None:
    assert selfcheck.verify_invariance(SHAPES, 64, [16], torch.bfloat16) == (RowRule(), True)


def test_an_attention_product_that_depends_on_the_row_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "product_into", by_row_count(products.product_into, 40))
    assert check()[0] == RowRule(64, 64)


@pytest.mark.parametrize("name", ["batch_product", "batch_product_add"])
def test_a_batched_product_of_other_bits(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    plain = getattr(products, name)
    monkeypatch.setattr(selfcheck, name, lambda *args: plain(*args).mul_(1 + 2**-20))
    assert check()[0] == RowRule(64, 64)


def test_an_exponential_that_depends_on_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vectorised part of a loop and its scalar end: what gelu and sigmoid do in this library."""
    monkeypatch.setattr(torch, "tanh", torch.sigmoid)
    rule, elementwise = check()
    assert rule == RowRule()
    assert not elementwise


def test_fixed_pieces_give_right_and_equal_bits(tiny_checkpoint: Path, engine: ScoringEngine) -> None:
    """A whole engine under the fixed rule: close to the free one, and the same bits packed, alone and split."""
    jobs = random_jobs(51, 800, [70, 5, 64], 4)
    plan, _ = make_plan(jobs)
    config = engine_config(tiny_checkpoint)
    fixed = Runner(engine._runner.model, RowRule(64, 64))
    together = score(ScoringEngine(config, fixed, engine.info), plan).logprobs
    assert np.abs(together - score(engine, plan).logprobs).max() < 1e-4
    small = engine_config(tiny_checkpoint, token_budget=60, max_tokens=200)
    assert np.array_equal(score(ScoringEngine(small, fixed, engine.info), plan).logprobs, together)
    first = 0
    for job in jobs:
        alone = score(ScoringEngine(config, fixed, engine.info), make_plan([job])[0]).logprobs
        assert np.array_equal(alone, together[first : first + len(alone)])
        first += len(alone)


def test_the_products_of_fixed_pieces_do_not_see_their_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a library that depends on the row count, the fixed rule still gives a row the same bits everywhere."""
    plain = torch.mm

    def by_count(a: Tensor, b: Tensor, **options: Any) -> Tensor:
        return plain(a, b, **options).mul_(1 + a.shape[0] * 2**-20)

    monkeypatch.setattr(torch, "mm", by_count)
    rule = RowRule(64, 64)
    torch.manual_seed(0)
    x, w = torch.randn(192, 24), torch.randn(24, 40)
    whole = products.product_into(torch.empty(192, 40), x, w, rule)
    part = products.product_into(torch.empty(64, 40), x[64:128], w, rule)
    batch = products.batch_product(x.view(3, 64, 24), w.expand(3, -1, -1), rule)
    assert torch.equal(part, whole[64:128])
    assert torch.equal(batch.view(192, 40), whole)
