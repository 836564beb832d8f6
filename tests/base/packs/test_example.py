"""The example repository that pack authors copy: sound, fitted by its own script, and true to its fixtures."""

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spinf_serve import packs
from spinf_serve.packs.fixtures import check_fixture
from spinf_serve.packs.pack import from_data
from spinf_serve.packs.repository import read_repository
from tests.base.packs.support import random_result, write_json

EXAMPLE = Path(__file__).resolve().parents[3] / "docs/examples/prompt-packs"
FIT = runpy.run_path(str(EXAMPLE / "fit.py"))


def test_the_example_is_a_sound_repository() -> None:
    found = read_repository(EXAMPLE)
    assert (found.problems, found.warnings) == ([], [])
    assert [pack.id for pack in found.packs] == ["example/support-triage", "example/forum-guard"]


@pytest.mark.parametrize("name", ["support-triage", "forum-guard"])
def test_its_fixtures_hold(name: str) -> None:
    pack = packs.load(EXAMPLE / f"packs/{name}/1.0.json")
    assert check_fixture(pack, EXAMPLE / f"packs/{name}/fixtures/1.0.json") == []


def test_the_full_pack_has_every_feature() -> None:
    pack = packs.load(EXAMPLE / "packs/forum-guard/1.0.json").model
    assert len(pack.contexts) == 2
    assert [p.required for p in pack.parameters.values()] == [True, False]
    assert {read.kind for read in pack.reads} == {"pair", "option", "any", "set"}
    assert pack.categories["hostile"].views
    assert pack.categories["threat"].requires == ("hostile",)
    assert pack.decision.critical == ("threat",)
    assert pack.decision.micro_layer is not None
    assert pack.decision.micro_layer.locked


@pytest.mark.parametrize("name", ["support-triage", "forum-guard"])
def test_a_version_is_its_draft_fitted(name: str) -> None:
    draft = json.loads((EXAMPLE / f"drafts/{name}.json").read_bytes())
    whole = json.loads((EXAMPLE / f"packs/{name}/1.0.json").read_bytes())
    for field in ("pack", "version", "model", "contexts", "scoring"):
        assert whole[field] == draft[field]
    assert packs.load(EXAMPLE / f"drafts/{name}.json", draft=True).draft


@pytest.mark.parametrize("name", ["support-triage", "forum-guard"])
def test_the_script_fits_a_sound_pack(name: str, tmp_path: Path) -> None:
    """On random results: loads without a warning, its lock holds, normal traffic is flagged as often as asked."""
    draft = json.loads((EXAMPLE / f"drafts/{name}.json").read_bytes())
    rng = np.random.default_rng(7)
    names = list(draft["categories"])
    rows: list[dict[str, Any]] = [{"labels": [names[i // 2 % len(names)]] if i % 2 else []} for i in range(90)]
    results = [random_result(rng, draft, (1.0,)) | {"input_id": str(i)} for i in range(90)]
    pack = from_data(FIT["fit"](draft, rows, results, 0.1), "fitted")
    assert pack.warnings == ()
    normal = [r for r, row in zip(results, rows, strict=True) if not row["labels"]]
    for category in pack.model.categories.values():
        if category.threshold is None or category.requires:
            continue
        flags = [pack.evaluate(result)["categories"][category.id]["flagged"] for result in normal]
        assert abs(sum(flags) - 0.1 * len(normal)) <= 1
    FIT["write_json"](tmp_path / "fixture.json", FIT["fixture"](pack, results[:3]))
    assert check_fixture(pack, tmp_path / "fixture.json") == []


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a draft, a baseline of 40 texts, and the results that a server gave for them."""
    draft = json.loads((EXAMPLE / "drafts/forum-guard.json").read_bytes())
    write_json(tmp_path / "draft.json", draft)
    labels = ["hostile", "threat", "advertising"]
    rows = [
        {"id": f"t{i}", "text": f"text {i}", "params": {"forum": "go"}} | ({"labels": [labels[i % 3]]} if i % 2 else {})
        for i in range(40)
    ]
    write_rows(tmp_path, rows)
    monkeypatch.setitem(FIT["score_step"].__globals__, "score_anywhere", stand_in(draft))
    run("score", tmp_path / "results.json")
    return tmp_path


def stand_in(draft: dict[str, Any]) -> Callable[..., Any]:
    rng = np.random.default_rng(11)

    def call(body: dict[str, Any]) -> dict[str, Any]:
        return {"results": [random_result(rng, draft, (1.0,)) | {"input_id": item["id"]} for item in body["inputs"]]}

    def score_anywhere(pack: Any, rows: Any, _options: Any) -> Any:
        return FIT["score"](pack, rows, call)

    return score_anywhere


def write_rows(folder: Path, rows: list[Any]) -> None:
    (folder / "base.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_rows(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "base.jsonl").read_text().splitlines()]


def run(step: str, results: Path, *more: Any) -> None:
    folder = results.parent
    FIT["main"]([step, *map(str, (folder / "draft.json", folder / "base.jsonl", results, *more))])


def refused(step: str, results: Path, *more: Any) -> str:
    with pytest.raises(SystemExit) as stopped:
        run(step, results, *more)
    return str(stopped.value.code)


def test_the_script_writes_a_version_once(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, out = desk / "results.json", desk / "packs/1.0.json"
    run("fit", results, out)
    assert read_repository(desk / "packs").problems == []
    assert f"wrote {out} and {desk / 'packs/fixtures/1.0.json'}" in capsys.readouterr().out
    before = {path: path.read_bytes() for path in (out, desk / "packs/fixtures/1.0.json")}
    assert "a published version never changes" in refused("fit", results, out, "--rate", 0.2)
    out.unlink()
    assert f"{desk / 'packs/fixtures/1.0.json'} exists" in refused("fit", results, desk / "packs/1.1.json")
    out.write_bytes(before[out])
    assert {path: path.read_bytes() for path in before} == before
    run("fit", results, out, "--rate", 0.2, "--force")
    assert out.read_bytes() != before[out]


def test_the_script_replaces_nothing_but_its_own_results(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (desk / "base.jsonl").read_bytes()
    assert "was not written by this step" in refused("score", desk / "base.jsonl")
    assert (desk / "base.jsonl").read_bytes() == before
    capsys.readouterr()
    run("score", desk / "results.json")
    told = capsys.readouterr().err.splitlines()
    assert told == ["scored 16 of 40 texts", "scored 32 of 40 texts", "scored 40 of 40 texts"]


def test_the_script_takes_no_results_of_other_questions_or_texts(desk: Path) -> None:
    results, out, rows = desk / "results.json", desk / "packs/1.0.json", read_rows(desk)
    write_rows(desk, [rows[0] | {"text": "another"}, *rows[1:]])
    assert "of other texts" in refused("fit", results, out)
    write_rows(desk, rows[:-1])
    assert "of other texts" in refused("fit", results, out)
    write_rows(desk, rows)
    draft = json.loads((desk / "draft.json").read_bytes())
    draft["scoring"]["queries"][0]["template"] = "\nThe words of this message are{?}"
    write_json(desk / "draft.json", draft)
    assert "another form of this draft" in refused("fit", results, out)
    assert "was not written by the step score" in refused("fit", desk / "draft.json", out)
    assert not out.exists()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "Expecting property name"),
        ("[1]", "line 41: "),
        ('{"id": 1, "text": "x"}', "id and text must be strings"),
        ('{"id": "t1", "text": "x", "params": {"forum": "go"}}', "the id t1 is there twice"),
        ('{"id": "n", "text": "x", "params": {"forum": "go"}, "labels": ["hostil"]}', "no such category: hostil"),
        ('{"id": "n", "text": "x", "params": {"forum": "go"}, "labels": 3}', "line 41: "),
        ('{"id": "n", "text": "x"}', "parameter forum: the pack requires this parameter"),
        ('{"id": "n", "text": "x", "params": {"forum": "go", "froum": "x"}}', "no such parameter"),
        ('{"id": "n", "text": "x", "params": 3}', "line 41: "),
    ],
)
def test_the_script_names_the_bad_line_of_a_baseline(desk: Path, line: str, words: str) -> None:
    with (desk / "base.jsonl").open("a") as file:
        file.write(line + "\n")
    for step, more in (("score", ()), ("fit", (desk / "packs/1.0.json",))):
        found = refused(step, desk / "results.json", *more)
        assert found.startswith(f"fit.py: {desk / 'base.jsonl'}, line 41: ")
        assert words in found


def test_the_script_says_what_a_baseline_lacks(desk: Path) -> None:
    rows = read_rows(desk)
    for labels, words in ((["hostile"], "needs normal traffic"), ([], "needs texts with this label")):
        write_rows(desk, [row | {"labels": labels} for row in rows])
        assert words in refused("fit", desk / "results.json", desk / "packs/1.0.json")
    assert "between 0 and 1" in refused("fit", desk / "results.json", desk / "packs/1.0.json", "--rate", 2)


def test_the_script_lists_the_problems_of_a_draft(desk: Path) -> None:
    draft = json.loads((desk / "draft.json").read_bytes())
    write_json(desk / "draft.json", draft | {"answers": "x", "media": ["tekst"]})
    assert refused("score", desk / "results.json").count(str(desk / "draft.json")) == 3


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--device", "cuda:99"), "fit.py: --device cuda:99"),
        (("--url", "http://127.0.0.1:1"), "fit.py: http://127.0.0.1:1/v1/score cannot be reached"),
    ],
)
def test_a_model_that_cannot_be_asked_is_a_message(tmp_path: Path, more: tuple[str, ...], words: str) -> None:
    paths = (EXAMPLE / "drafts/forum-guard.json", EXAMPLE / "baseline/forum-guard.jsonl", tmp_path / "results.json")
    with pytest.raises(SystemExit) as stopped:
        FIT["main"](["score", *map(str, paths), *more])
    assert str(stopped.value.code).startswith(words)
    assert not (tmp_path / "results.json").exists()


def test_a_fitted_number_is_never_a_negative_zero() -> None:
    """Other languages write it as 0, and the lock is over the file's own spelling."""
    assert str(FIT["in_file"](-1e-9)) == "0.0"


def test_fitted_reads_are_standard_over_normal_traffic() -> None:
    draft = json.loads((EXAMPLE / "drafts/forum-guard.json").read_bytes())
    rng = np.random.default_rng(3)
    results = [random_result(rng, draft) for _ in range(60)]
    normal = np.arange(60) < 50
    model = from_data(draft, "draft", draft=True).model
    FIT["fit_reads"](draft, model, results, normal)
    fitted = from_data(draft, "draft", draft=True).model
    for read in fitted.reads:
        values = [(FIT["read_value"](read, FIT["answers_of"](fitted, r)) - read.mean) / read.sd for r in results[:50]]
        assert np.mean(values) == pytest.approx(0, abs=1e-5)
        assert np.std(values, ddof=1) == pytest.approx(1, abs=1e-5)
