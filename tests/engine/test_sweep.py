"""The self-check finds nothing here, and finds what is broken on purpose."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from spinf_serve import gpus
from spinf_serve.cli import app
from spinf_serve.hub import client
from tests.engine.support import summed
from workers.engine import sweep
from workers.engine.kernels.products import RowRule
from workers.engine.models import model_config
from workers.engine.sweep import (
    Finding,
    Sweep,
    cancelling,
    cpu_findings,
    draw,
    first_difference,
    row_counts,
    weight_rows,
)

CPU = torch.device("cpu")


def findings(snapshot: Path, scheme: str = "f32", rows: int = 70) -> list[Finding]:
    return list(Sweep(model_config(snapshot), scheme, CPU, rows, RowRule()).findings())


def broken(found: list[Finding]) -> set[str]:
    return {finding.op for finding in found if not finding.invariant}


def test_row_counts() -> None:
    assert row_counts(3) == [1, 2, 3]
    assert row_counts(300) == [*range(1, 65), 127, 128, 129, 255, 256, 257, 300]
    most = row_counts(16_384)
    assert {1023, 1024, 1025, 16_255, 16_256, 16_257, 16_383, 16_384} <= set(most)
    assert most[-1] == 16_384


def test_a_run_is_compared_from_both_ends() -> None:
    x = torch.arange(100.0).unsqueeze(1)
    assert first_difference(lambda rows: (rows * 2,), [x], [1, 5, 99]) is None
    assert first_difference(lambda rows: (rows - rows[:1],), [x], [1, 5]) == 1, "what depends on the first row"
    assert first_difference(lambda rows: (rows * (1 + (len(rows) == 5)),), [x], [1, 5, 99]) == 5
    assert first_difference(lambda rows: (rows, rows.amax().expand(len(rows))), [x], [99]) == 99, "any output"


def test_bits_are_compared_and_not_values() -> None:
    zero = torch.zeros(4, 1)
    assert first_difference(lambda rows: (rows * (-1.0 if len(rows) == 2 else 1.0),), [zero], [1, 2]) == 2
    assert first_difference(lambda rows: (rows * float("nan"),), [zero], [1, 2]) is None


def test_cancelled_sums_show_their_order() -> None:
    """Terms that are added the other way round: in bf16 the last rounding hides it, unless they cancel."""

    def differing(x: Tensor, weight: Tensor) -> Tensor:
        """The share of the rows of x that another order changes, by channel."""
        there, back = summed(x, weight).bfloat16(), summed(x, weight, backwards=True).bfloat16()
        return (there != back).float().mean(dim=0)

    x = draw(32, 512, device=CPU, seed=0)
    weight = torch.cat([rows for _, rows in weight_rows(64, 512, CPU, 1)()])
    hidden, shown = differing(x, weight), differing(cancelling(x.clone()), weight)
    assert hidden.mean() < 0.01
    assert shown[::2].min() > 0.8, "half of the channels cancel"
    assert shown[1::2].mean() < 0.01, "the other half are ordinary sums"


@pytest.mark.parametrize("scheme", ["f32", "bf16"])
@pytest.mark.parametrize("name", ["tiny_checkpoint", "tiny_gemma4"])
def test_everything_is_invariant_here(request: pytest.FixtureRequest, name: str, scheme: str) -> None:
    found = findings(request.getfixturevalue(name), scheme, rows=130)
    assert not broken(found), [finding for finding in found if not finding.invariant]
    assert {finding.op for finding in found} >= {
        "o_proj",
        "gate_up_proj",
        "down_proj",
        "norm",
        "residual and norm",
        "gated activation",
        "split, norm, rotary",
        "head",
        "whole passes",
    }


def by_rows(op: Callable[..., Any], at: int) -> Callable[..., Any]:
    """The op with other bits for every row where there are `at` rows."""

    def changed(x: Tensor, *more: Any, **options: Any) -> Any:
        rows = x.shape[0]
        out = op(x, *more, **options)
        for tensor in out if isinstance(out, tuple) else [out]:
            if rows == at:
                tensor.mul_(1 + 2**-7)
        return out

    return changed


@pytest.mark.parametrize(
    ("name", "at", "op"),
    [
        ("norm_encode", 64, "norm"),
        ("residual_norm", 33, "residual and norm"),
        ("gelu_mul_encode", 7, "gated activation"),
        ("qkv_norm_rotary", 40, "split, norm, rotary"),
        ("lm_head_logprobs", 48, "head"),
    ],
)
def test_an_op_that_depends_on_the_row_count_is_named(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, name: str, at: int, op: str
) -> None:
    monkeypatch.setattr(sweep, name, by_rows(getattr(sweep, name), at))
    found = findings(tiny_checkpoint)
    assert broken(found) == {op}
    first = {finding.first for finding in found if not finding.invariant}
    assert first == ({33} if op == "head" else {at})  # the head's rows are padded to 16 before it sees them


def test_a_product_that_depends_on_the_row_count_is_named(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workers.engine.layers import linear as module

    plain = module.linear

    def changed(x: Tensor, weight: Tensor, rule: RowRule) -> Tensor:
        out = plain(x, weight, rule)
        return out * (1 + 2**-20) if x.shape[0] == 63 and weight.shape[1] == 128 else out

    monkeypatch.setattr(module, "linear", changed)
    found = findings(tiny_checkpoint)
    wrong = [(finding.op, finding.first) for finding in found if not finding.invariant]
    assert [entry for entry in wrong if entry[0] != "whole passes"] == [("down_proj", 63)]


def test_attention_that_sees_its_company_is_noticed(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from workers.engine.layers import attention as module

    plain = module.tree_attention

    def leaking(q: Tensor, *more: Any, **options: Any) -> Tensor:
        out = plain(q, *more, **options)
        return out + out[:1] * 2**-20

    monkeypatch.setattr(module, "tree_attention", leaking)
    found = findings(tiny_checkpoint)
    assert broken(found) == {"whole passes"}
    assert "together" in found[-1].note
    assert "in reverse" in found[-1].note


def test_on_the_cpu_the_start_check_is_made_shape_by_shape(tiny_gemma4: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = model_config(tiny_gemma4)
    found = list(cpu_findings(facts, "f32", RowRule()))
    assert not broken(found)
    assert sum(finding.op == "attention" for finding in found) == 2
    monkeypatch.setattr(sweep, "attention_is_invariant", lambda head_dim, _rule: head_dim != 16)
    monkeypatch.setattr(sweep, "linear_is_invariant", lambda k, o, _rule, _dtype: (k, o) != (128, 64))
    wrong = {(finding.op, finding.shape) for finding in cpu_findings(facts, "f32", RowRule()) if finding.note}
    assert wrong == {("attention", "heads of 16"), ("linear", "128 → 64")}
    monkeypatch.setattr(sweep, "linear_is_invariant", lambda k, o, _rule, _dtype: (k, o) != (64, 4096))
    wrong = {(finding.op, finding.shape) for finding in cpu_findings(facts, "f32", RowRule()) if finding.note}
    assert ("head", "64 → 4096") in wrong


# The command


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["selfcheck", *arguments])


def test_the_command_needs_no_weights(tiny_gemma4: Path, tmp_path: Path) -> None:
    """A directory, or a config.json anywhere."""
    config = tmp_path / "config.json"
    config.write_bytes((tiny_gemma4 / "config.json").read_bytes())
    for model in (str(tmp_path), str(config)):
        result = invoke(model, "--device", "cpu")
        assert result.exit_code == 0, result.output
        assert result.stdout.splitlines()[-1] == "invariant"
        assert "heads of 16" in result.stdout


def test_the_command_as_json(tiny_gemma4: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = invoke(str(tiny_gemma4), "--device", "cpu", "--quant", "bf16", "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 0
    assert (found["scheme"], found["invariant"], found["compute_capability"]) == ("bf16", True, None)
    assert {entry["op"] for entry in found["findings"]} >= {"linear", "attention"}
    monkeypatch.setattr(sweep, "elementwise_is_invariant", lambda: False)
    result = invoke(str(tiny_gemma4), "--device", "cpu", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["invariant"] is False
    result = invoke(str(tiny_gemma4), "--device", "cpu")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1].startswith("NOT invariant")
    assert "DEPEND ON THE PLACE" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--device", "cpu", "--quant", "fp8s"], "--quant fp8s: not available on cpu; available: f32, bf16 (or auto)"),
        (["--device", "gpu"], "--device: expected cpu, cuda or cuda:N"),
        (["--quant", "fp9"], "--quant: unknown scheme"),
        (["--device", "cuda:0"], "--device cuda:0: no NVIDIA driver is installed here"),
    ],
)
def test_what_cannot_be_checked_is_refused(
    tiny_gemma4: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], reason: str
) -> None:
    monkeypatch.setattr(gpus, "ask_driver", gpus.Driver)
    result = invoke(str(tiny_gemma4), *arguments)
    assert result.exit_code == 1
    assert reason in result.stderr
    assert "Traceback" not in result.stderr


def test_a_family_that_is_not_served_is_refused_before_the_hub_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "fetch", None)
    result = invoke("spinf/qwen3.8-27b-int4", "--device", "cpu")
    assert result.exit_code == 1
    assert result.stderr.startswith("spinf-serve: model spinf/qwen3.8-27b-int4: its family qwen35 is not supported yet")


def test_a_config_that_is_not_served_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    assert "'bert' is not supported" in invoke(str(tmp_path), "--device", "cpu").stderr
