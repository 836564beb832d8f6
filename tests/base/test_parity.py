"""Parity without an engine: fixtures, references, and what counts as a difference."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spinf_serve.manifests import Catalog, load_manifest
from spinf_serve.parity import Fixture, Reference, bound_for, compare, compare_entries, read_fixture
from spinf_serve.plan import EngineInfo
from spinf_serve.refusal import StartRefused

JOBS = {"jobs": [{"id": "a"}, {"id": "b"}, {"id": "c"}], "limits": {"max_options": 3}}
INFO = EngineInfo("fp_1", "f32", True, "cpu", None, 1, 1, 1, {"torch": "2"})


def write(path: Path, value: Any) -> Path:
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def fixture(body: dict[str, Any] | None = None) -> Fixture:
    return Fixture(body or JOBS, "sha256:0")


def reference(**changes: Any) -> Reference:
    return replace(Reference.of("m", "r", INFO, fixture(), {"a": {"logprobs": [[-1.5]]}}), **changes)


def test_the_passes_pack_the_fixture_differently() -> None:
    limits = {"limits": {"max_options": 3}}
    alone = [{"jobs": [{"id": name}], **limits} for name in "abc"]
    assert fixture().bodies(0) == [JOBS]
    assert fixture().bodies(1) == alone
    assert fixture().bodies(2) == [{"jobs": JOBS["jobs"][::-1], **limits}]
    assert fixture().bodies(4) == alone


def test_a_scoring_request_is_taken_apart_by_its_inputs() -> None:
    body = {"inputs": [{"id": "x"}, {"id": "y"}], "scoring": {}}
    assert fixture(body).bodies(1) == [
        {"inputs": [{"id": "x"}], "scoring": {}},
        {"inputs": [{"id": "y"}], "scoring": {}},
    ]
    single = {"messages": [], "scoring": {}}
    assert fixture(single).bodies(1) == fixture(single).bodies(2) == [single]


def test_results_by_entry() -> None:
    responses = [{"results": [{"id": "a", "logprobs": [[-1.0]], "packed_tokens": 9}]}, {"results": []}]
    assert fixture().results(responses) == {"a": {"logprobs": [[-1.0]]}}
    scored = [{"results": [{"input_id": "0", "queries": [1]}]}]
    assert fixture({"messages": []}).results(scored) == {"0": {"queries": [1]}}


def test_the_digest_is_of_the_meaning(tmp_path: Path) -> None:
    first = read_fixture(write(tmp_path / "a", '{"jobs": [1],\n "x": 2}'))
    assert first.digest == read_fixture(write(tmp_path / "b", '{"x":2,"jobs":[1]}')).digest
    assert first.digest != read_fixture(write(tmp_path / "c", '{"x":2,"jobs":[2]}')).digest


@pytest.mark.parametrize("content", ["{", "[]", "", "\x00"])
def test_unreadable_fixtures(tmp_path: Path, content: str) -> None:
    with pytest.raises(StartRefused, match=r"the fixture .*f\.json"):
        read_fixture(write(tmp_path / "f.json", content))
    with pytest.raises(StartRefused, match=r"the fixture .*gone\.json cannot be read"):
        read_fixture(tmp_path / "gone.json")


def test_a_reference_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = reference(results={"a": {"logprobs": [[-4.115480422973633, -1e-30]]}})
    written.write(tmp_path / "r.json")
    assert Reference.read(tmp_path / "r.json") == written
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


@pytest.mark.parametrize("change", [{"format": "spinf-parity-2"}, {"scheme": None, "extra": 1}, {"format": None}])
def test_other_files_are_no_references(tmp_path: Path, change: dict[str, Any]) -> None:
    reference().write(tmp_path / "r.json")
    value = json.loads((tmp_path / "r.json").read_text()) | change
    if value["scheme"] is None:
        del value["scheme"]
    with pytest.raises(StartRefused, match="no parity reference"):
        Reference.read(write(tmp_path / "r.json", value))


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    """Which of the two numbers was recorded?"""
    path = tmp_path / "reference.json"
    reference().write(path)
    path.write_text(path.read_text().replace('"scheme":', '"scheme": "bf16", "scheme":'))
    with pytest.raises(StartRefused, match=r"reference\.json cannot be read: 'scheme' is given twice"):
        Reference.read(path)
    path.write_text('{"jobs": [], "jobs": []}')
    with pytest.raises(StartRefused, match="'jobs' is given twice"):
        read_fixture(path)


def test_a_reference_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "r.json").mkdir()
    with pytest.raises(StartRefused, match=r"r\.json cannot be written"):
        reference().write(tmp_path / "r.json")
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_the_bound_is_bits_for_one_engine_and_rounding_for_others() -> None:
    assert bound_for(reference(), INFO, fixture()) == 0.0
    assert bound_for(reference(fingerprint="fp_2"), INFO, fixture()) == 1e-4
    assert bound_for(reference(), replace(INFO, batch_invariant=False), fixture()) == 1e-4


REFUSED = [
    (reference(fixture="sha256:1"), INFO, "another fixture"),
    (reference(scheme="bf16"), INFO, "recorded in scheme bf16, this is f32"),
    (reference(scheme="bf16", fingerprint="fp_2"), replace(INFO, scheme="bf16"), "only scores of one batch-invariant"),
    (reference(scheme="fp8"), replace(INFO, scheme="fp8", batch_invariant=False), "only scores of one batch-invariant"),
]


@pytest.mark.parametrize(("recorded", "info", "message"), REFUSED)
def test_what_cannot_be_compared_is_refused(recorded: Reference, info: EngineInfo, message: str) -> None:
    with pytest.raises(StartRefused, match=message):
        bound_for(recorded, info, fixture())


TREE = {"queries": [{"id": "q", "options": [{"p": 0.25, "floor_p": None}]}], "flag": True}


def test_equal_trees() -> None:
    found = compare(TREE, json.loads(json.dumps(TREE)), 0.0)
    assert (found.values, found.largest, found.differences) == (1, 0.0, ())


@pytest.mark.parametrize(
    ("now", "path"),
    [
        ({**TREE, "flag": 1.5}, "flag"),
        ({**TREE, "flag": False}, "flag"),
        ({**TREE, "more": 1}, "more"),
        ({"flag": True}, "queries"),
        ({**TREE, "queries": []}, "queries.0"),
        ({**TREE, "queries": [{"id": "r", "options": [{"p": 0.25, "floor_p": None}]}]}, "queries.0.id"),
        ({**TREE, "queries": [{"id": "q", "options": [{"p": 0.25, "floor_p": 0.1}]}]}, "queries.0.options.0.floor_p"),
        ({**TREE, "queries": [{"id": "q", "options": [{"p": 0.2502, "floor_p": None}]}]}, "queries.0.options.0.p"),
        (
            {**TREE, "queries": [{"id": "q", "options": [{"p": float("nan"), "floor_p": None}]}]},
            "queries.0.options.0.p",
        ),
        (None, ""),
    ],
)
def test_any_difference_is_found_whatever_the_bound(now: Any, path: str) -> None:
    for bound in (0.0, 1e-4):
        (difference,) = compare(TREE, now, bound).differences
        assert difference.path == path


@pytest.mark.parametrize(("recorded", "now"), [(True, 1), (1, True), (10**400, 1.0), (0.0, False)])
def test_what_is_no_number_equals_none(recorded: Any, now: Any) -> None:
    assert len(compare({"a": recorded}, {"a": now}, 1e-4).differences) == 1


def test_small_differences_are_measured_and_pass_within_the_bound() -> None:
    now = json.loads(json.dumps(TREE).replace("0.25", "0.25005"))
    within = compare(TREE, now, 1e-4)
    assert (round(within.largest, 8), within.differences) == (5e-5, ())
    assert len(compare(TREE, now, 0.0).differences) == 1
    assert len(compare({"p": 0.25}, {"p": 0.25 + 2**-57}, 0.0).differences) == 0  # the same double


def test_entries_that_only_one_side_has() -> None:
    found = compare_entries({"a": {"x": 1.0}, "b": {"x": 1.0}}, {"b": {"x": 1.0}, "c": {"x": 1.0}}, 0.0)
    assert {entry: len(comparison.differences) for entry, comparison in found.items()} == {"a": 1, "b": 0, "c": 1}


def test_paths_of_a_manifest_are_relative_to_it(tmp_path: Path) -> None:
    text = (Path(__file__).resolve().parents[2] / "manifests/gemma-3-270m.toml").read_text()
    manifest = load_manifest(write(tmp_path / "m.toml", text))
    assert manifest.parity is not None
    assert manifest.parity.fixture == str(tmp_path / "parity/fixture.json")
    whole = load_manifest(write(tmp_path / "n.toml", text.replace("parity/fixture.json", "/data/f.json")))
    assert whole.parity is not None
    assert whole.parity.fixture == "/data/f.json"


def test_parity_data_of_the_built_in_manifests_are_there() -> None:
    named = [m.parity for m in Catalog.load([]).manifests if m.parity is not None]
    assert named
    for data in named:
        assert Reference.read(Path(data.reference)).fixture == read_fixture(Path(data.fixture)).digest
