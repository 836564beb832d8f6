"""Pack files: what is accepted, and for every rule of the page the problem that names the place."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from spinf_client import packs as client

from spinf_serve import packs
from spinf_serve.packs.pack import MAX_FILE_BYTES, from_data
from spinf_serve.packs.parse import parse_pack
from spinf_serve.packs.problems import MAX_LISTED, MORE
from tests.base.packs.support import draft_of, random_pack, small_pack, write_json

Edit = Callable[[dict[str, Any]], Any]


def problems_after(edit: Edit) -> list[str]:
    data = copy.deepcopy(small_pack())
    edit(data)
    return packs.validate(data)


def put(*path: Any) -> Edit:
    """An edit that sets the value at a path: put("reads", 0, "sd", 0)."""
    *way, name, value = path

    def edit(data: dict[str, Any]) -> None:
        target: Any = data
        for step in way:
            target = target[step]
        target[name] = value

    return edit


def drop(*path: Any) -> Edit:
    *way, name = path

    def edit(data: dict[str, Any]) -> None:
        target: Any = data
        for step in way:
            target = target[step]
        del target[name]

    return edit


Q, R, C, D = "scoring.queries", "reads", "categories", "decision"
RULES: list[tuple[Edit, str]] = [
    (put("pack", "Acme/guard"), "pack: must be <namespace>/<name>"),
    (put("pack", "guard"), "pack: must be <namespace>/<name>"),
    (put("pack", "../guard"), "pack: must be <namespace>/<name>"),
    (put("pack", "acme/guard\n"), "pack: must be <namespace>/<name>"),
    (put("version", "1 0"), "version: must be"),
    (put("version", 1), "version: must be a string"),
    (put("version", "1" * 120), "version: id and version together"),
    (drop("model"), "model: missing"),
    (put("media", ["image"]), "media: must hold text"),
    (put("media", ["text", "smell"]), "media.1: must be one of"),
    (put("media", ["text", "text"]), "media.1: repeats a kind"),
    (put("answers", "logit"), "answers: must be p or logprob"),
    (put("parameters", "X", {"label": "x"}), "parameters.X: X is reserved"),
    (put("parameters", "a b", {"label": "x"}), "parameters.a b: a name is letters"),
    (put("parameters", "who", {}), "parameters.who.label: missing"),
    (put("parameters", "who", "required", "no"), "parameters.who.required: must be true or false"),
    (put("parameters", "who", "default", 1), "parameters.who.default: must be a string"),
    (put("parameters", "who", "defualt", "x"), "parameters.who.defualt: unknown key (did you mean default?)"),
    (put("contexts", {}), "contexts: must hold at least one"),
    (put("contexts", "chat", "no place"), "contexts.chat: must hold {X} exactly once"),
    (put("contexts", "chat", "{X}{X}"), "contexts.chat: must hold {X} exactly once"),
    (put("contexts", "chat", "{whom}: {X}"), "contexts.chat: {whom} is no parameter"),
    (put("contexts", "chat", "{{X}} {X}"), "contexts.chat: holds a brace"),
    (put("contexts", "chat", "{ {X}"), "contexts.chat: holds a brace"),
    (put("scoring", "groups", 1), "scoring.groups: unknown key"),
    (put("scoring", "case_insensitive", 1), "scoring.case_insensitive: must be true or false"),
    (put("scoring", "queries", []), f"{Q}: must hold at least one query"),
    (put("scoring", "queries", 0, "group", "g"), f"{Q}.0.group: a pack's queries have no group"),
    (put("scoring", "queries", 0, "max_tokens", 4), f"{Q}.0.max_tokens: unknown key"),
    (put("scoring", "queries", 0, "template", "\nWhat{*}"), f"{Q}.0.template: a pack asks scored questions only"),
    (put("scoring", "queries", 0, "template", "\nWhat"), f"{Q}.0.template: the template has no slot"),
    (put("scoring", "queries", 0, "options", [" yes"]), f"{Q}.0.options: must hold at least two options"),
    (put("scoring", "queries", 0, "options", [" yes", " yes"]), f"{Q}.0.options.1: repeats option 0"),
    (put("scoring", "queries", 0, "options", [" yes", ""]), f"{Q}.0.options.1: an option must be a string"),
    (put("scoring", "queries", 0, "id", "tone"), f"{Q}.2.id: repeats the id"),
    (put("scoring", "queries", 0, "id", "x" * 129), f"{Q}.0.id: must have 1 to 128 characters"),
    (put("scoring", "queries", 1, "template", "\n{G}{?}"), f"{Q}.1.template: {{G}}: the only placeholder"),
    (drop("scoring", "queries", 1, "combinations"), f"{Q}.1.combinations: missing"),
    (put("scoring", "queries", 1, "combinations", []), f"{Q}.1.combinations: must hold at least one value of F"),
    (put("scoring", "queries", 1, "combinations", 0, "F", 3), f"{Q}.1.combinations.0.F: must be a string"),
    (put("scoring", "queries", 1, "combinations", 0, "F", "x" * 257), f"{Q}.1.combinations.0.F: must have at most 256"),
    (put("scoring", "queries", 1, "combinations", 1, "F", "money"), f"{Q}.1.combinations.1.F: repeats a value"),
    (put("scoring", "queries", 1, "combinations", 0, "G", "x"), f"{Q}.1.combinations.0.G: unknown key"),
    (put("scoring", "queries", 1, "combinations", "some"), f"{Q}.1.combinations: must be a list"),
    (put("scoring", "queries", 2, "values", {}), f"{Q}.2.values.F: missing"),
    (put("reads", []), f"{R}: must hold at least one read"),
    (put("reads", 1, "id", "r-ok"), f"{R}.1.id: repeats the id"),
    (put("reads", 0, "query", "nope"), f"{R}.0.query: no such query"),
    (put("reads", 0, "kind", "mean"), f"{R}.0.kind: must be one of"),
    (put("reads", 1, "kind", "pair"), f"{R}.1.kind: pair reads a query with two options, this one has 3"),
    (put("reads", 0, "category", "nope"), f"{R}.0.category: no such category"),
    (put("reads", 0, "F", "money"), f"{R}.0.F: the query has no placeholder"),
    (put("reads", 1, "F", "weather"), f"{R}.1.F: no such combination"),
    (drop("reads", 1, "F"), f"{R}.1.F: missing"),
    (drop("reads", 0, "mean"), f"{R}.0.mean: missing"),
    (put("reads", 0, "mean", True), f"{R}.0.mean: must be a number"),
    (put("reads", 0, "mean", float("nan")), f"{R}.0.mean: must be a number"),
    (put("reads", 0, "mean", 10**400), f"{R}.0.mean: must be a number"),
    (put("reads", 0, "sd", 0), f"{R}.0.sd: must be greater than 0"),
    (put("reads", 0, "sd", 1e-101), f"{R}.0.sd: must be at least 1e-100"),
    (put("reads", 0, "mean", -1e101), f"{R}.0.mean: must be a number"),
    (put("categories", "harm", "platt", [1e101, 0]), f"{C}.harm.platt: must be two numbers"),
    (put("reads", 0, "sign", 2), f"{R}.0.sign: must be 1 or -1"),
    (put("reads", 0, "mu", 1), f"{R}.0.mu: does not go with kind pair"),
    (put("reads", 0, "wieght", 1), f"{R}.0.wieght: unknown key"),
    (drop("reads", 1, "mu"), f"{R}.1.mu: missing"),
    (put("reads", 1, "mu", 0.5), f"{R}.1.mu: must be a list of numbers"),
    (put("reads", 1, "mu", [1, 2]), f"{R}.1.mu: holds 2 numbers, the query has 3 options"),
    (put("reads", 2, "mu", [1, 2, 3]), f"{R}.2.mu: must be a number"),
    (drop("reads", 2, "option"), f"{R}.2.option: missing"),
    (put("reads", 2, "option", 3), f"{R}.2.option: must be the index"),
    (put("reads", 2, "option", -1), f"{R}.2.option: must be the index"),
    (put("reads", 2, "option", True), f"{R}.2.option: must be the index"),
    (drop("reads", 3, "unsafe"), f"{R}.3.unsafe: missing"),
    (put("reads", 3, "unsafe", []), f"{R}.3.unsafe: must hold some of the options"),
    (put("reads", 3, "unsafe", [0, 1, 2, 3]), f"{R}.3.unsafe: must hold some of the options, and not all"),
    (put("reads", 3, "unsafe", [1, 1]), f"{R}.3.unsafe.1: repeats"),
    (put("reads", 3, "unsafe", [4]), f"{R}.3.unsafe.0: must be the index"),
    (put("categories", {}), f"{C}: must hold at least one"),
    (put("categories", "lonely", {"label": "L", "platt": [1, 0], "threshold": None}), f"{C}.lonely: no read feeds"),
    (drop("categories", "harm", "label"), f"{C}.harm.label: missing"),
    (drop("categories", "harm", "platt"), f"{C}.harm.platt: missing"),
    (put("categories", "harm", "platt", [1]), f"{C}.harm.platt: must be two numbers"),
    (drop("categories", "harm", "threshold"), f"{C}.harm.threshold: missing"),
    (put("categories", "harm", "threshold", 1.01), f"{C}.harm.threshold: must be a number from 0 to 1"),
    (put("categories", "harm", "threshold", True), f"{C}.harm.threshold: must be a number from 0 to 1"),
    (put("categories", "harm", "aggregate", "max"), f'{C}.harm.aggregate: must be "views"'),
    (put("categories", "harm", "aggregate", "views"), f"{C}.harm: aggregates views, but none of its reads has a view"),
    (put("categories", "harm", "requires", ["nope"]), f"{C}.harm.requires.0: no such category"),
    (put("categories", "harm", "requires", ["harm"]), f"{C}.harm.requires: a category cannot require itself"),
    (put("categories", "harm", "decides", "no"), f"{C}.harm.decides: must be true or false"),
    (put("categories", "harm", "normal_quantiles", "levels", [0.5]), f"{C}.harm.normal_quantiles: levels and values"),
    (
        put("categories", "harm", "normal_quantiles", "values", [0.5, 0.4, 0.9]),
        f"{C}.harm.normal_quantiles.values: must",
    ),
    (put("decision", "mode", "vote"), f"{D}.mode: must be one of"),
    (put("decision", "fallback", "micro_layer"), f"{D}.fallback: must be one of"),
    (drop("decision", "max"), f"{D}.fallback: max needs max.threshold"),
    (put("decision", "max", {}), f"{D}.max.threshold: missing"),
    (put("decision", "max", {"threshold": None}), f"{D}.max.threshold: must be a number"),
    (drop("decision", "micro_layer"), f"{D}.mode: there is no micro_layer"),
    (put("decision", "critical", ["nope"]), f"{D}.critical.0: no such category"),
    (put("decision", "treshold", 1), f"{D}.treshold: unknown key"),
    (put("decision", "micro_layer", "inputs", []), f"{D}.micro_layer.inputs: must hold at least one"),
    (put("decision", "micro_layer", "inputs", 0, "harm"), f'{D}.micro_layer.inputs.0: must be "c:"'),
    (put("decision", "micro_layer", "inputs", 1, "c:harm"), f"{D}.micro_layer.inputs.1: repeats"),
    (put("decision", "micro_layer", "weights", "%%"), f"{D}.micro_layer.weights: is not base64"),
    (put("decision", "micro_layer", "weights", "AAA="), f"{D}.micro_layer.weights: is not a whole number"),
    (
        put("decision", "micro_layer", "weights", "AAAAAA=="),
        f"{D}.micro_layer.weights: holds 1 numbers; 3 inputs need 5",
    ),
    (
        put("decision", "micro_layer", "weights", "AACAfwAAAAAAAAAAAAAAAAAAAAA="),
        f"{D}.micro_layer.weights: holds a number",
    ),
    (put("decision", "micro_layer", "hidden", 2), f"{D}.micro_layer.weights: holds 5 numbers; 3 inputs and 2 hidden"),
    (put("decision", "micro_layer", "hidden", 0), f"{D}.micro_layer.hidden: must be within"),
    (put("decision", "micro_layer", "dtype", "float16"), f'{D}.micro_layer.dtype: must be "float32"'),
    (put("decision", "micro_layer", "lock", "md5:0"), f"{D}.micro_layer.lock: must begin with"),
]


def test_the_small_pack_is_valid() -> None:
    assert packs.validate(small_pack()) == []


@pytest.mark.parametrize(("edit", "problem"), RULES, ids=[rule[1][:60] for rule in RULES])
def test_every_rule_names_the_place(edit: Edit, problem: str) -> None:
    found = problems_after(edit)
    assert any(line.startswith(problem) for line in found), found


def test_all_problems_are_listed() -> None:
    """Every rule at once, as far as the edits do not undo one another: one run must show them all."""
    data = copy.deepcopy(small_pack())
    wanted = [
        (put("pack", "Acme"), "pack: "),
        (put("answers", "x"), "answers: "),
        (put("contexts", "post", "{X}{X}"), "contexts.post: "),
        (put("scoring", "queries", 0, "options", ["", ""]), f"{Q}.0.options.0: "),
        (put("scoring", "queries", 2, "values", "F", [1, "a", "a"]), f"{Q}.2.values.F.2: "),
        (put("reads", 0, "sd", -1), f"{R}.0.sd: "),
        (put("reads", 2, "option", 9), f"{R}.2.option: "),
        (put("categories", "money", "platt", "x"), f"{C}.money.platt: "),
        (put("decision", "micro_layer", "weights", "?"), f"{D}.micro_layer.weights: "),
    ]
    for edit, _ in wanted:
        edit(data)
    found = packs.validate(data)
    for _, problem in wanted:
        assert any(line.startswith(problem) for line in found), (problem, found)
    assert any(line.startswith(f"{Q}.0.options.1: ") for line in found)


@pytest.mark.parametrize("data", [None, [], "x", 3, {}])
def test_what_is_no_pack_is_refused(data: Any) -> None:
    assert packs.validate(json.dumps(data) if isinstance(data, str) else data)


def test_words_that_change_no_score_may_be_added() -> None:
    pack = from_data(small_pack(description="For the forum", answer="logprob"), "test")
    assert pack.warnings == ("answer: unknown key (did you mean answers?); it is ignored",)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"{", "is not valid JSON"),
        (b"\xff{}", "is not valid UTF-8"),
        (b'{"pack": 1, "pack": 2}', "the same key twice"),
        (b'{"pack": NaN}', "NaN is not JSON"),
        (b'{"pack": 1e999}', "beyond the range"),
        (b'{"pack": "\\ud800"}', "lone surrogate"),
        (b"[" * 100_000, "nested too deeply"),
        (b" " * (MAX_FILE_BYTES + 1), "over 16 MiB"),
    ],
    ids=["json", "utf8", "twice", "nan", "huge", "surrogate", "deep", "big"],
)
def test_files_that_are_not_strict_json(tmp_path: Path, content: bytes, problem: str) -> None:
    file = tmp_path / "pack.json"
    file.write_bytes(content)
    with pytest.raises(packs.PackError) as caught:
        packs.load(file)
    assert len(caught.value.problems) == 1
    assert problem in caught.value.problems[0]


def test_a_missing_file_is_a_pack_error(tmp_path: Path) -> None:
    with pytest.raises(packs.PackError, match="cannot be read"):
        packs.load(tmp_path / "none.json")


def test_a_file_up_to_the_limit_loads(tmp_path: Path) -> None:
    content = json.dumps(small_pack()).encode()
    file = tmp_path / "pack.json"
    file.write_bytes(content + b" " * (MAX_FILE_BYTES - len(content)))
    assert packs.load(file).id == "acme/guard"


def test_the_lock_is_pythons_json_of_the_file_as_it_stands(tmp_path: Path) -> None:
    data = small_pack()
    assert data["decision"]["micro_layer"]["lock"] == client.lock_of(data)
    # Non-ASCII letters, integers beside floats, and exponents in the file keep their own form.
    data["scoring"]["queries"][0]["template"] = "\nÄrger, 価格 \U0001f600?{?}"
    data["reads"][0] |= {"mean": 1e-07, "sd": 1}
    data["decision"]["micro_layer"]["lock"] = client.lock_of(data)
    pack = packs.load(write_json(tmp_path / "pack.json", data))
    assert pack.model.decision.micro_layer is not None
    assert pack.model.decision.micro_layer.locked
    for changed in (put("reads", 0, "sd", 1.0), put("categories", "money", "platt", [0.8, 0.2])):
        edited = copy.deepcopy(data)
        changed(edited)
        layer = from_data(edited, "test").model.decision.micro_layer
        assert layer is not None
        assert not layer.locked
    free = copy.deepcopy(data)
    put("categories", "harm", "threshold", 0.1)(free)
    put("decision", "critical", [])(free)
    layer = from_data(free, "test").model.decision.micro_layer
    assert layer is not None
    assert layer.locked


def test_random_packs_are_valid() -> None:
    rng = np.random.default_rng(5)
    for _ in range(200):
        assert packs.validate(random_pack(rng)) == []


def test_drafts_load_only_as_drafts(tmp_path: Path) -> None:
    data = draft_of(small_pack())
    file = write_json(tmp_path / "draft.json", data)
    with pytest.raises(packs.PackError):
        packs.load(file)
    assert packs.load(file, draft=True).draft
    assert packs.validate(data, draft=True) == []
    whole = packs.load(write_json(tmp_path / "whole.json", small_pack()), draft=True)
    assert not whole.draft


def test_a_draft_is_checked_too() -> None:
    data = draft_of(small_pack())
    data["reads"][2]["option"] = 7
    data["decision"]["mode"] = "vote"
    found = packs.validate(data, draft=True)
    assert any(line.startswith("reads.2.option: ") for line in found)
    assert any(line.startswith("decision.mode: ") for line in found)


@pytest.mark.parametrize(
    "changes",
    [
        {"media": [1] * 50_000},
        {f"reads{i}": 1 for i in range(50_000)},
        {"reads": [{"id": "r", **{f"key{i}": 1 for i in range(50_000)}}]},
        {"reads": [3] * 50_000},
    ],
    ids=["media", "root", "keys", "reads"],
)
def test_a_file_of_nothing_but_faults_is_listed_in_bounds(changes: dict[str, Any]) -> None:
    """In lines, and so that a start does not wait: one guess at a misspelt key takes a fifth of a millisecond."""
    _, problems = parse_pack(small_pack() | changes)
    lines = problems.found if len(problems.found) > len(problems.warnings) else problems.warnings
    assert len(lines) == MAX_LISTED + 1
    assert lines[-1] == MORE
    assert sum("did you mean" in line for line in lines) == (20 if "reads0" in changes else 0)


def test_repeated_inputs_of_a_layer_are_found_in_one_pass() -> None:
    class Counted(str):
        compared = 0
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            Counted.compared += 1
            return str(self) == other

    data = small_pack()
    data["decision"]["micro_layer"]["inputs"] = [Counted("c:harm") for _ in range(2000)]
    found = packs.validate(data)
    assert "decision.micro_layer.inputs.1: repeats an input" in found
    assert Counted.compared < 20_000
