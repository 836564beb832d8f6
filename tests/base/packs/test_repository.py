"""Repositories: the manifest against its files, discovery without one, and fixtures."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spinf_serve.packs.discovery import version_key
from spinf_serve.packs.fixtures import check_fixture, differences
from spinf_serve.packs.listed import Repository
from spinf_serve.packs.pack import from_data
from spinf_serve.packs.repository import read_drafts, read_repository
from tests.base.packs.support import draft_of, random_result, small_pack, write_json, write_repository

Edit = Callable[[dict[str, Any]], Any]


def edited(root: Path, edit: Edit) -> Repository:
    manifest = json.loads((root / "prompt-packs.json").read_bytes())
    edit(manifest)
    write_json(root / "prompt-packs.json", manifest)
    return read_repository(root)


def test_a_manifest_lists_packs_and_versions_in_its_order(tmp_path: Path) -> None:
    root = write_repository(
        tmp_path, [small_pack(version="2.0"), small_pack(version="10.0"), small_pack(pack="acme/b")]
    )
    found = read_repository(root)
    assert found.problems == []
    assert [(pack.id, [v.version for v in pack.versions]) for pack in found.packs] == [
        ("acme/guard", ["2.0", "10.0"]),
        ("acme/b", ["1.2.0"]),
    ]
    version = found.packs[0].versions[0]
    assert version.pack is not None
    assert version.content == (root / "packs/acme-guard-2.0.json").read_bytes()


def _entry(manifest: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = manifest["packs"][0]
    return entry


def _version(manifest: dict[str, Any]) -> dict[str, Any]:
    version: dict[str, Any] = _entry(manifest)["versions"][0]
    return version


PROBLEMS: list[tuple[Edit, str]] = [
    (lambda m: m.update(format=2), "format: must be 1"),
    (lambda m: m.pop("namespace"), "namespace: missing"),
    (lambda m: m.update(namespace="other"), "packs.0.id: acme/guard is outside the namespace other"),
    (lambda m: m["packs"].append(m["packs"][0]), "packs.1.id: acme/guard is listed twice"),
    (lambda m: m["packs"].append(3), "packs.1: must be an object"),
    (lambda m: _entry(m).update(id="Acme/guard"), "packs.0.id: must be <namespace>/<name>"),
    (lambda m: _entry(m).update(readme="nope.md"), "packs.0.readme: nope.md does not exist"),
    (lambda m: _entry(m).update(samples="nope.json"), "packs.0.samples: nope.json does not exist"),
    (lambda m: _entry(m).update(tags=[1]), "packs.0.tags: must be a list of strings"),
    (lambda m: _entry(m).update(versions=[]), "packs.0.versions: must hold at least one"),
    (lambda m: _entry(m).pop("versions"), "packs.0.versions: missing"),
    (
        lambda m: _entry(m)["versions"].append(dict(_version(m))),
        "packs.0.versions.1.version: acme/guard 1.2.0 is listed twice",
    ),
    (lambda m: _version(m).update(file="none.json"), "packs.0.versions.0.file: none.json does not exist"),
    (lambda m: _version(m).update(file="../../etc/passwd"), "packs.0.versions.0.file: ../../etc/passwd is outside"),
    (lambda m: _version(m).update(file="/etc/passwd"), "packs.0.versions.0.file: /etc/passwd is outside"),
    (lambda m: _version(m).pop("file"), "packs.0.versions.0.file: missing"),
    (lambda m: _version(m).update(fixture="none.json"), "packs.0.versions.0.fixture: none.json does not exist"),
    (lambda m: _version(m).update(status="beta"), "packs.0.versions.0.status: must be one of"),
    (lambda m: _version(m).pop("model"), "packs.0.versions.0.model: missing"),
    (lambda m: _version(m).update(version="9"), "packs.0.versions.0.file: packs/acme-guard-1.2.0.json: its version is"),
    (lambda m: _version(m).update(model="other"), "packs.0.versions.0.file: packs/acme-guard-1.2.0.json: its model is"),
    (lambda m: _entry(m).update(media=["text"]), "packs.0.versions.0.file: packs/acme-guard-1.2.0.json: its media is"),
    (
        lambda m: _entry(m).update(parameters=["who"]),
        "packs.0.versions.0.file: packs/acme-guard-1.2.0.json: its parameters",
    ),
    (lambda m: _entry(m).update(id="acme/other"), "packs.0.versions.0.file: packs/acme-guard-1.2.0.json: its id is"),
]


@pytest.mark.parametrize(("edit", "problem"), PROBLEMS, ids=[rule[1][:50] for rule in PROBLEMS])
def test_every_rule_of_the_manifest_names_the_place(repository: Path, edit: Edit, problem: str) -> None:
    found = edited(repository, edit).problems
    assert any(line.startswith(f"prompt-packs.json: {problem}") for line in found), found


def test_an_entry_may_repeat_what_its_file_says(repository: Path) -> None:
    (repository / "README.md").write_text("read me")

    def edit(manifest: dict[str, Any]) -> None:
        parameters = [{"id": "place"}, {"id": "who"}]
        _entry(manifest).update(media=["image", "text"], parameters=parameters, readme="README.md", samples=["a text"])

    assert edited(repository, edit).problems == []


def test_a_link_out_of_the_repository_is_not_followed(repository: Path, tmp_path: Path) -> None:
    secret = write_json(tmp_path / "secret.json", small_pack())
    os.symlink(secret, repository / "link.json")
    found = edited(repository, lambda m: _version(m).update(file="link.json"))
    assert "link.json is outside the repository" in found.problems[0]


def test_problems_of_every_pack_file_are_listed(tmp_path: Path) -> None:
    one, two = small_pack(), small_pack(pack="acme/two", answers="x")
    one["reads"][0]["sd"] = 0
    found = read_repository(write_repository(tmp_path, [one, two])).problems
    assert any("packs/acme-guard-1.2.0.json: reads.0.sd" in line for line in found)
    assert any("packs/acme-two-1.2.0.json: answers" in line for line in found)


def test_a_version_that_is_coming_soon_needs_no_file(repository: Path) -> None:
    def edit(manifest: dict[str, Any]) -> None:
        _entry(manifest)["versions"].insert(0, {"version": "2.0", "status": "coming_soon"})

    found = edited(repository, edit)
    assert found.problems == []
    assert [(v.version, v.status, v.pack is None) for v in found.packs[0].versions] == [
        ("2.0", "coming_soon", True),
        ("1.2.0", "available", False),
    ]


@pytest.mark.parametrize("content", ["{", "[]", "3", '{"format": 1, "format": 1}'])
def test_a_broken_manifest_is_a_problem_and_not_discovery(repository: Path, content: str) -> None:
    (repository / "prompt-packs.json").write_text(content)
    assert len(read_repository(repository).problems) >= 1


def test_without_a_manifest_pack_files_are_discovered(tmp_path: Path) -> None:
    for version in ("1.10", "1.9", "2.0rc1", "2.0", "odd"):
        write_json(tmp_path / f"deep/er/{version}.json", small_pack(version=version))
    write_json(tmp_path / "other.json", {"pack": "acme/x"})
    write_json(tmp_path / "list.json", [1])
    write_json(tmp_path / ".git/hidden.json", small_pack(pack="acme/hidden"))
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "pack.txt").write_text(json.dumps(small_pack(version="3")))
    found = read_repository(tmp_path)
    assert found.problems == []
    assert [(pack.id, [v.version for v in pack.versions]) for pack in found.packs] == [
        ("acme/guard", ["2.0", "2.0rc1", "1.10", "1.9", "odd"])
    ]


def test_discovered_files_must_be_sound_and_differ(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", small_pack())
    write_json(tmp_path / "b.json", small_pack())
    write_json(tmp_path / "c.json", small_pack(version="2", answers="x"))
    found = read_repository(tmp_path).problems
    assert found == ["b.json: acme/guard 1.2.0 is in another file too", "c.json: answers: must be p or logprob"]


def test_discovered_drafts_stand_apart(tmp_path: Path) -> None:
    """Beside the version that was made of them; with a problem of their own they are still checked as drafts."""
    write_json(tmp_path / "drafts/guard.json", draft_of(small_pack()))
    write_json(tmp_path / "packs/1.2.0.json", small_pack())
    found = read_repository(tmp_path)
    assert (found.problems, [pack.id for pack in found.packs]) == ([], ["acme/guard"])
    assert [(draft.file, draft.pack.draft) for draft in found.drafts] == [("drafts/guard.json", True)]
    write_json(tmp_path / "drafts/guard.json", draft_of(small_pack(answers="x")))
    assert read_repository(tmp_path).problems == ["drafts/guard.json: answers: must be p or logprob"]


def test_a_pack_that_lost_a_number_is_no_draft(tmp_path: Path) -> None:
    """It must not vanish from a server; whoever is fitting it asks for drafts."""
    half = small_pack()
    del half["reads"][0]["sd"]
    write_json(tmp_path / "half.json", half)
    assert read_repository(tmp_path).problems == ["half.json: reads.0.sd: missing"]
    found = read_drafts(tmp_path)
    assert (found.problems, [draft.file for draft in found.drafts]) == ([], ["half.json"])


def test_drafts_are_found_beside_a_manifest(repository: Path) -> None:
    write_json(repository / "drafts/guard.json", draft_of(small_pack(version="3")))
    assert read_repository(repository).drafts == []
    found = read_drafts(repository)
    assert [draft.pack.version for draft in found.drafts] == ["3"]
    assert [pack.id for pack in found.packs] == ["acme/guard"]


def test_a_pack_that_is_not_json_does_not_go_missing(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", small_pack())
    (tmp_path / "b.json").write_text(json.dumps(small_pack(version="2")).replace("}", ",}", 1))
    (tmp_path / "c.json").write_text('{"scoring": 1,}')
    found = read_repository(tmp_path).problems
    assert len(found) == 1
    assert found[0].startswith("b.json: the file is not valid JSON")


def test_files_that_cannot_be_read_are_problems_and_pipes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(tmp_path / "a.json", small_pack())
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "gone.json").symlink_to(tmp_path / "nowhere")
    assert read_repository(tmp_path).problems == []
    write_json(tmp_path / "secret.json", small_pack(version="2"))
    opened = Path.open

    def guarded_open(path: Path, *arguments: Any) -> Any:
        if path.name == "secret.json":
            raise PermissionError(13, "Permission denied")
        return opened(path, *arguments)

    monkeypatch.setattr(Path, "open", guarded_open)
    assert read_repository(tmp_path).problems == ["secret.json: cannot be read: Permission denied"]


@pytest.mark.parametrize(
    ("entry", "file", "same"),
    [
        ("gemma-3-270m", "demo", True),
        ("Demo", "gemma-3-270m", True),
        ("demo", "DEMO", True),
        ("spinf/gemma-4-12b-fp8", "gemma-4-12b", True),
        ("gemma-3-270m", "spinf/gemma-4-12b-fp8", False),
        ("somebody/else", "demo", False),
    ],
)
def test_an_entry_names_a_model_by_any_of_its_names(tmp_path: Path, entry: str, file: str, same: bool) -> None:
    root = write_repository(tmp_path, [small_pack(model=file)])
    found = edited(root, lambda m: _version(m).update(model=entry))
    assert (found.problems == []) is same
    assert [v.model for v in found.packs[0].versions] == [file]


def test_a_folder_without_packs_is_a_problem(tmp_path: Path) -> None:
    assert "holds no packs" in read_repository(tmp_path).problems[0]
    assert "is no folder" in read_repository(tmp_path / "none").problems[0]


def test_versions_sort_as_pep_440() -> None:
    versions = ["1.0", "1.0.dev1", "1.0a1", "1.0.post1", "1.10", "1.9", "what", "0+local"]
    assert sorted(versions, key=version_key) == [
        "what",
        "0+local",
        "1.0.dev1",
        "1.0a1",
        "1.0",
        "1.0.post1",
        "1.9",
        "1.10",
    ]


def fixture(tmp_path: Path, **changes: Any) -> Path:
    pack = from_data(small_pack(), "test")
    result = random_result(np.random.default_rng(1), pack.data) | {"input_id": "a"}
    entry = pack.evaluate(result)
    call = {"mode": "max", "thresholds": {"harm": 0.1, "tone": None}}
    data = {
        "results": [result],
        "expected": [
            {"input_id": "a", "categories": entry["categories"], "decision": entry["decision"]},
            {"input_id": "a", "with": call, **_of(pack.evaluate(result, **call))},
        ],
    }
    return write_json(tmp_path / "fixtures" / "1.2.0.json", data | changes)


def _of(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: entry[name] for name in ("categories", "decision")}


def test_a_fixture_holds(tmp_path: Path) -> None:
    assert check_fixture(from_data(small_pack(), "test"), fixture(tmp_path)) == []


@pytest.mark.parametrize(("by", "holds"), [(9e-7, True), (1e-6, True), (2.1e-6, False), (-1e-5, False)])
def test_a_fixture_holds_to_a_millionth(tmp_path: Path, by: float, holds: bool) -> None:
    path = fixture(tmp_path)
    data = json.loads(path.read_bytes())
    data["expected"][1]["categories"]["harm"]["score"] += by
    write_json(path, data)
    found = check_fixture(from_data(small_pack(), "test"), path)
    assert (found == []) is holds
    assert holds or found[0].startswith("expected.1.categories.harm.score: is ")


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ([], "must hold the lists"),
        ({"results": [], "expected": []}, "must hold the lists"),
        ({"results": [], "expected": [3]}, "expected.0: must hold"),
        ({"results": [], "expected": [{"input_id": "z", "categories": {}, "decision": {}}]}, "no result has this"),
        (
            {
                "results": [{"input_id": "a", "queries": []}],
                "expected": [{"input_id": "a", "categories": {}, "decision": {}}],
            },
            "cannot be evaluated",
        ),
        (
            {"results": [], "expected": [{"input_id": "a", "with": {"top": 1}, "categories": {}, "decision": {}}]},
            "expected.0.with",
        ),
    ],
)
def test_broken_fixtures_are_problems(tmp_path: Path, data: Any, problem: str) -> None:
    found = check_fixture(from_data(small_pack(), "test"), write_json(tmp_path / "f.json", data))
    assert problem in found[0]


def test_differences_know_booleans_from_numbers_and_missing_from_null() -> None:
    assert differences({"a": True}, {"a": 1}, "x") == [("x.a", True, 1)]
    assert differences({"a": 1.0}, {"a": 1}, "x") == []
    assert differences({"a": None}, {"b": "c"}, "x") == [("x.b", None, "c")]


def test_a_fixture_beside_the_file_is_found(tmp_path: Path) -> None:
    root = write_repository(tmp_path, [small_pack()])
    assert read_repository(root).packs[0].versions[0].fixture is None
    fixture(root / "packs")
    assert read_repository(root).packs[0].versions[0].fixture == root / "packs/fixtures/1.2.0.json"


@pytest.mark.parametrize("name", ["a" * 5000, "a/" * 3000 + "x", "circle", "circle/x", "a\0b", "."])
@pytest.mark.parametrize("field", ["file", "fixture", "readme", "samples"])
def test_a_name_that_can_be_no_file_is_a_problem(repository: Path, name: str, field: str) -> None:
    (repository / "circle").symlink_to("circle")
    found = edited(
        repository, lambda m: (_version if field in ("file", "fixture") else _entry)(m).update({field: name})
    )
    assert len(found.problems) == 1


@pytest.mark.parametrize(
    ("field", "value"), [("readme", True), ("readme", []), ("samples", 3), ("samples", {}), ("status", "")]
)
def test_fields_of_the_wrong_type_are_problems(repository: Path, field: str, value: Any) -> None:
    found = edited(repository, lambda m: (_version if field == "status" else _entry)(m).update({field: value}))
    assert len(found.problems) == 1
    assert f".{field}: must be" in found.problems[0]


RESULT_FAULTS: list[Edit] = [
    lambda r: r.update(input_id=[]),
    lambda r: r.update(queries=3),
    lambda r: r["queries"].append(None),
    lambda r: r["queries"][0].pop("id"),
    lambda r: r["queries"][0].update(combinations=None),
    lambda r: r["queries"][0]["combinations"][0].update(values=None),
    lambda r: r["queries"][0]["combinations"][0].update(options=[1, 2]),
    lambda r: _option(r).pop("p"),
    lambda r: _option(r).update(p="often"),
    lambda r: _option(r).update(p=-0.1),
    lambda r: _option(r).update(p=1e308),
    lambda r: _option(r).update(p=10**400),
]


def _option(result: dict[str, Any]) -> dict[str, Any]:
    option: dict[str, Any] = result["queries"][0]["combinations"][0]["options"][0]
    return option


@pytest.mark.parametrize("fault", RESULT_FAULTS)
def test_a_broken_result_is_a_problem_of_its_fixture(tmp_path: Path, fault: Edit) -> None:
    path = fixture(tmp_path)
    data = json.loads(path.read_bytes())
    fault(data["results"][0])
    write_json(path, data)
    found = check_fixture(from_data(small_pack(), "test"), path)
    assert len(found) in (1, 2)
    assert found[0].startswith(("expected.0: ", "a number is beyond"))
