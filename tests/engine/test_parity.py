"""`spinf-serve parity` on real engines: the recorded references hold, and every kind of difference ends with 1."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from spinf_serve.cli import app
from spinf_serve.parity import read_fixture
from tests.support.tiny_gemma4 import make_tiny_gemma4
from workers.engine.engine import ScoringEngine

DATA = Path(__file__).resolve().parents[1] / "data/parity"
FIXTURE, RECORDED = DATA / "fixture.json", DATA / "tiny_gemma4.json"
"""The fixture, and what the random checkpoint `make_tiny_gemma4(…)` answered when it was recorded. To record it again:
write the checkpoint, then `spinf-serve parity DIR --device cpu --fixture … --reference … --record`."""

Json = dict[str, Any]


def parity(model: Path | str, *arguments: object) -> Any:
    command = ["parity", str(model), "--device", "cpu", *(str(argument) for argument in arguments)]
    return CliRunner().invoke(app, command)


def checked(model: Path, *arguments: object, reference: Path = RECORDED) -> Any:
    return parity(model, "--fixture", FIXTURE, "--reference", reference, *arguments)


def edited(tmp_path: Path, edit: Callable[[Json], Any]) -> Path:
    """The recorded reference, changed."""
    value = json.loads(RECORDED.read_text(encoding="utf-8"))
    edit(value)
    (tmp_path / "reference.json").write_text(json.dumps(value))
    return tmp_path / "reference.json"


def test_the_random_checkpoint_still_answers_as_recorded(tiny_gemma4: Path) -> None:
    result = checked(tiny_gemma4, "--passes", 3)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("entry")
    assert "pass 3" in result.stdout
    assert str(RECORDED) in result.stdout.splitlines()[-1]


def test_the_demo_still_answers_as_recorded(demo_snapshot: Path) -> None:
    """Fixture and reference of the manifest."""
    result = parity("demo", "--passes", 1)
    assert result.exit_code == 0, result.output


def test_a_changed_number_is_a_difference(tiny_gemma4: Path, tmp_path: Path) -> None:
    def change(value: Json) -> None:
        value["results"]["refund"]["logprobs"][0][1] += 2e-4

    result = checked(tiny_gemma4, reference=edited(tmp_path, change))
    assert result.exit_code == 1
    assert "pass 1: refund: logprobs.0.1: recorded " in result.stderr
    assert "2 values differ" in result.stderr, "once in each of the two passes"
    assert " !" in result.stdout
    assert "equal to" not in result.stdout


def test_the_last_bit_is_a_difference_on_the_same_engine(tiny_gemma4: Path, tmp_path: Path) -> None:
    reference = tmp_path / "r.json"
    assert checked(tiny_gemma4, "--record", reference=reference).exit_code == 0
    assert "bit for bit" in checked(tiny_gemma4, reference=reference).stdout
    value = json.loads(reference.read_text())
    value["results"]["refund"]["logprobs"][0][1] *= 1 + 2**-50
    reference.write_text(json.dumps(value))
    assert checked(tiny_gemma4, reference=reference).exit_code == 1
    value["fingerprint"] = "fp_0000000000"
    reference.write_text(json.dumps(value))
    result = checked(tiny_gemma4, reference=reference)
    assert (result.exit_code, "within 1e-04 of" in result.stdout) == (0, True)


def test_other_weights_are_a_difference(tmp_path: Path) -> None:
    other = make_tiny_gemma4(tmp_path / "other", seed=7)
    result = checked(other)
    assert result.exit_code == 1
    assert "values differ" in result.stderr


EDITS: dict[str, tuple[Callable[[Json], Any], str]] = {
    "an entry too many": (lambda v: v["results"].update(more={"logprobs": [[0.0]]}), "more"),
    "an entry missing": (lambda v: v["results"].pop("refund"), "refund"),
    "another fixture": (lambda v: v.update(fixture="sha256:0"), "another fixture"),
    "another scheme": (lambda v: v.update(scheme="bf16"), "recorded in scheme bf16"),
    "no reference": (lambda v: v.clear(), "no parity reference"),
}


@pytest.mark.parametrize("name", EDITS)
def test_references_that_do_not_fit(tiny_gemma4: Path, tmp_path: Path, name: str) -> None:
    edit, message = EDITS[name]
    result = checked(tiny_gemma4, "--passes", 1, reference=edited(tmp_path, edit))
    assert result.exit_code == 1
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_recording_and_comparing_in_bf16(tiny_gemma4: Path, tmp_path: Path) -> None:
    reference = tmp_path / "bf16.json"
    result = checked(tiny_gemma4, "--record", "--quant", "bf16", "--passes", 3, reference=reference)
    assert result.exit_code == 0, result.output
    assert checked(tiny_gemma4, "--quant", "bf16", "--passes", 3, reference=reference).exit_code == 0
    assert checked(tiny_gemma4, reference=reference).exit_code == 1


def test_a_body_of_the_public_route_is_a_fixture_too(tiny_gemma4: Path, tmp_path: Path) -> None:
    query = {"id": "q", "template": "\n\nRefund?\nAnswer:{?}", "options": [" yes", " no"]}
    inputs = [{"id": f"i{n}", "messages": [{"role": "user", "content": f"text {n}"}]} for n in range(3)]
    fixture, reference = tmp_path / "f.json", tmp_path / "r.json"
    fixture.write_text(json.dumps({"inputs": inputs, "scoring": {"queries": [query]}}))
    arguments = ("--fixture", fixture, "--reference", reference, "--passes", 3)
    assert parity(tiny_gemma4, *arguments, "--record").exit_code == 0
    assert json.loads(reference.read_text())["results"].keys() == {"i0", "i1", "i2"}
    assert parity(tiny_gemma4, *arguments).exit_code == 0


def test_a_pass_that_disagrees_is_never_recorded(
    tiny_gemma4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine whose numbers depend on the company that an entry keeps."""
    from spinf_serve.engine_api import Engine

    plain = Engine.score_jobs

    def by_company(self: Engine, body: Any) -> Any:
        response = plain(self, body)
        for entry in response["results"]:
            entry["logprobs"][0][0] += 1e-9 * len(response["results"])
        return response

    monkeypatch.setattr(Engine, "score_jobs", by_company)
    result = checked(tiny_gemma4, "--record", reference=tmp_path / "r.json")
    assert result.exit_code == 1
    assert not (tmp_path / "r.json").exists()
    assert checked(tiny_gemma4, "--record", "--passes", 1, reference=tmp_path / "r.json").exit_code == 0


def test_a_model_without_parity_data_needs_both_paths(tiny_gemma4: Path) -> None:
    result = parity(tiny_gemma4)
    assert result.exit_code == 1
    assert "--fixture is needed" in result.stderr
    assert "--reference is needed" in parity(tiny_gemma4, "--fixture", FIXTURE).stderr


def test_a_refused_fixture_says_why(tiny_gemma4: Path, tmp_path: Path) -> None:
    (tmp_path / "f.json").write_text('{"jobs": [{"id": "a", "prompts": [], "options": []}]}')
    result = parity(tiny_gemma4, "--fixture", tmp_path / "f.json", "--reference", tmp_path / "r.json", "--record")
    assert result.exit_code == 1
    assert "the fixture is refused: " in result.stderr
    assert not (tmp_path / "r.json").exists()


@pytest.fixture
def unloadable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads weights fails the test."""
    monkeypatch.setattr(ScoringEngine, "load", lambda *_: pytest.fail("the weights were read"))


TOO_LONG = {"jobs": [{"id": "a", "content": "word " * 70_000, "prompts": ["x"], "options": [" yes"]}]}


@pytest.mark.parametrize("body", [{"jobs": []}, {"inputs": 3}, TOO_LONG], ids=["no job", "no inputs", "too long"])
@pytest.mark.usefixtures("unloadable")
def test_a_bad_fixture_costs_no_load(tiny_gemma4: Path, tmp_path: Path, body: Json) -> None:
    fixture = tmp_path / "fixture.json"
    fixture.write_text(json.dumps(body))
    digest = read_fixture(fixture).digest
    reference = edited(tmp_path, lambda value: value.update(fixture=digest))
    result = parity(tiny_gemma4, "--fixture", fixture, "--reference", reference)
    assert result.exit_code == 1, result.output
    assert "the fixture is refused: " in result.stderr


UNUSABLE: dict[str, tuple[Callable[[Json], Any], list[str], str]] = {
    "scheme": (lambda value: value.update(scheme="bf16"), [], "recorded in scheme bf16, this is f32"),
    "asked scheme": (lambda value: None, ["--quant", "bf16"], "recorded in scheme f32, this is bf16"),
    "fixture": (lambda value: value.update(fixture="sha256:0"), [], "belongs to another fixture"),
    "results": (lambda value: value.update(results=[1]), [], "is no parity reference: results is list"),
    "versions": (lambda value: value.update(versions=None), [], "is no parity reference: versions is NoneType"),
}


@pytest.mark.parametrize("name", UNUSABLE)
@pytest.mark.usefixtures("unloadable")
def test_an_unusable_reference_costs_no_load(tiny_gemma4: Path, tmp_path: Path, name: str) -> None:
    edit, flags, message = UNUSABLE[name]
    result = checked(tiny_gemma4, *flags, reference=edited(tmp_path, edit))
    assert result.exit_code == 1, result.output
    assert message in result.stderr


@pytest.mark.parametrize("name", [".", "absent/r.json"])
@pytest.mark.usefixtures("unloadable")
def test_a_reference_that_could_not_be_written_costs_no_load(tiny_gemma4: Path, tmp_path: Path, name: str) -> None:
    result = checked(tiny_gemma4, "--record", reference=tmp_path / name)
    assert result.exit_code == 1, result.output
    assert "cannot be written" in result.stderr
