"""Within a body the first fault in document order is reported, wherever it is found."""

import itertools
import json
import random
from typing import Any

import pytest

from spinf_serve.config import Limits
from spinf_serve.protocol.document import Faults, Place
from spinf_serve.protocol.request import read_request
from tests.support.requests import MODEL, item, query


def sound() -> dict[str, Any]:
    return {
        "model": "demo",
        "endpoint": "e",
        "inputs": [
            item("a", "text", query_ids=["q"]),
            item("b", [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}], queries=[query(id="own")]),
        ],
        "scoring": {
            "queries": [query(), query(id="r", template="{x}?{?}", combinations=[{"x": "a"}, {"x": "b"}])],
            "empty_floor": True,
        },
    }


FAULTS: list[tuple[tuple[str | int, ...], Any, str]] = [
    (("model",), "other", "model_not_served"),
    (("endpoint",), "", "invalid_field"),
    (("inputs", 0, "id"), 7, "invalid_field"),
    (("inputs", 0, "query_ids", 0), "none", "unknown_query_id"),
    (("inputs", 0, "messages", 0, "content"), 7, "invalid_field"),
    (("inputs", 1, "messages", 0, "content", 1), {"type": "x"}, "unsupported_content"),
    (("inputs", 1, "queries", 0, "options", 1), "", "invalid_field"),
    (("inputs", 1, "queries", 0, "template"), "{", "invalid_template"),
    (("scoring", "queries", 0, "options"), [], "too_many_options"),
    (("scoring", "queries", 1, "combinations", 1), {"y": "a"}, "missing_value"),
    (("scoring", "queries", 1, "id"), "q", "duplicate_id"),
    (("scoring", "empty_floor"), 1, "invalid_field"),
]


def shuffled(value: Any, rng: random.Random) -> Any:
    """The same document with the fields of every object in another order."""
    if isinstance(value, dict):
        keys = list(value)
        rng.shuffle(keys)
        return {key: shuffled(value[key], rng) for key in keys}
    return [shuffled(v, rng) for v in value] if isinstance(value, list) else value


def put(value: Any, path: tuple[str | int, ...], wrong: Any) -> None:
    for step in path[:-1]:
        value = value[step]
    value[path[-1]] = wrong


def first_written(value: Any, paths: list[tuple[str | int, ...]]) -> tuple[str | int, ...]:
    """Which of the paths begins first in the text of the document: the oracle, by searching the text itself."""
    found = {}
    for path in paths:
        marked = json.loads(json.dumps(value))
        put(marked, path, "\0mark")
        found[json.dumps(marked).index("\\u0000mark")] = path
    return found[min(found)]


@pytest.mark.parametrize("seed", range(40))
def test_the_earlier_of_many_faults(seed: int) -> None:
    rng = random.Random(seed)
    value = shuffled(sound(), rng)
    chosen = rng.sample(FAULTS, rng.randint(2, 5))
    # One fault inside another would hide it.
    paths = [p for p, _, _ in chosen if not any(p != q and p[: len(q)] == q for q, _, _ in chosen)]
    for path in paths:
        put(value, path, next(wrong for p, wrong, _ in chosen if p == path))
    error = read_request(value, MODEL, Limits()).faults.first
    assert error is not None
    expected = first_written(value, paths)
    assert error.param is not None
    assert error.param.split(".")[: len(expected)] == [str(step) for step in expected]
    assert error.code == next(code for p, _, code in chosen if p == expected)


def test_each_fault_alone() -> None:
    for path, wrong, code in FAULTS:
        value = sound()
        put(value, path, wrong)
        error = read_request(value, MODEL, Limits()).faults.first
        assert error is not None
        assert error.code == code


def test_a_missing_field_is_missed_where_its_object_stands() -> None:
    value = sound()
    del value["inputs"][0]["id"]
    value["inputs"][0]["messages"] = 3
    error = read_request(value, MODEL, Limits()).faults.first
    assert error is not None
    assert error.param == "inputs.0.id"


def test_both_messages_and_inputs_stand_where_the_second_does() -> None:
    for names in itertools.permutations(["messages", "model", "inputs"]):
        full = sound() | {"messages": [{"content": "a"}], "model": "other"}
        value = {name: full[name] for name in names} | {"scoring": full["scoring"]}
        error = read_request(value, MODEL, Limits()).faults.first
        assert error is not None
        assert error.param == ("messages" if names[2] == "model" else "model")


def test_places_compare_by_document_order() -> None:
    faults = Faults()
    faults.add(Place(("b",), (1,)), "invalid_field", "second")
    assert faults.before(Place(("c",), (1, 0)))
    assert not faults.before(Place(("a",), (0, 9)))
    faults.add(Place(("a",), (0, 5)), "invalid_field", "inside the first")
    faults.add(Place(("a",), (0,)).end(), "invalid_field", "after all inside the first")
    faults.add(Place(("a",), (0, 5)), "invalid_field", "later on the same place")
    assert faults.first is not None
    assert faults.first.message == "inside the first"
