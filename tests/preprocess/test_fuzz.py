"""Whatever a body holds, it is answered or refused with a code of the table: never another exception."""

import copy
import json
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spinf_serve.protocol.errors import RequestError
from tests.support.fake_engine import run_plan
from tests.support.requests import body, header, item, query
from workers.preprocess.preprocessor import CHAT, SCORE, V0_SCORE, Preprocessor, error_body

FIELDS = """
messages inputs scoring queries packs id template options combinations values group empty_floor case_insensitive
content role type text image_url url query_ids limits features model endpoint stream max_tokens generate calibration
a x jobs prompts
"""
NAMES = FIELDS.split()
VALUES = [
    *(None, True, False, 0, -1, 1, 10**30, 1.5, 1e308, "", "a", " yes", "all", "{?}", "{x}{?}", "{n}", "{*}\n", "text"),
    *([], {}, [[]], [{}], ["a", "a"], {"x": ["a"]}, {"a": 1}, [" yes", " no"], "\0", "▁", "<bos>", "😀", "é" * 300),
]


def bodies() -> list[dict[str, Any]]:
    """Sound bodies that use every field."""
    placed = query("\n{x}, {y}?{?}", id="p", combinations="all", values={"x": ["a", "b"], "y": ["c"]}, group="g")
    part = {"type": "text", "text": "Some text."}
    return [
        body(query(), placed, model="demo", endpoint="e", stream=False),
        {
            "inputs": [
                item("a", [part, part], query_ids=["q"]),
                item("b", queries=[query(id="own", empty_floor=False)]),
            ],
            "scoring": {"queries": [query(), placed], "packs": [], "empty_floor": True, "case_insensitive": False},
            "limits": {"max_options": 5},
            "features": {"media": []},
        },
        {"jobs": [{"id": "a", "prompts": ["One", "One two"], "options": [[" yes"], [" no", " yes no"]]}]},
    ]


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        found += paths(inner, (*path, key))
    return found


def damaged(value: Any, rng: random.Random) -> Any:
    """One to four places replaced, removed, renamed, doubled or moved."""
    value = copy.deepcopy(value)
    for _ in range(rng.randint(1, 4)):
        path = rng.choice(paths(value))
        if not path:
            continue
        parent = value
        for step in path[:-1]:
            parent = parent[step]
        match rng.randrange(5):
            case 0 | 1:
                parent[path[-1]] = copy.deepcopy(rng.choice(VALUES))
            case 2:
                del parent[path[-1]]
            case 3 if isinstance(parent, dict):
                parent[rng.choice(NAMES)] = parent.pop(path[-1])
            case _ if isinstance(parent, list):
                parent.insert(rng.randrange(len(parent) + 1), copy.deepcopy(parent[path[-1]]))
    return value


def check(prep: Preprocessor, raw: bytes, route: str, trusted: bool) -> str:
    head = header(route, trusted=trusted)
    refused: RequestError | None = None
    try:
        prepared = prep.prepare(raw, head)
        json.loads(prep.assemble(prepared, run_plan(prepared.plan)))
    except RequestError as error:
        refused = error
    if refused is None:
        return "ok"
    assert refused.status in (400, 413), refused.code
    assert 0 < len(refused.message) < 500
    assert len(error_body(refused, head)) < 3000
    return refused.code


@pytest.mark.parametrize("seed", range(8))
def test_damaged_bodies(seed: int, prep: Preprocessor) -> None:
    rng = random.Random(seed)
    seen = set()
    for _ in range(150):
        value = damaged(rng.choice(bodies()), rng)
        route = rng.choice([SCORE, SCORE, CHAT, V0_SCORE])
        seen.add(check(prep, json.dumps(value).encode(), route, rng.random() < 0.5))
    assert {"ok", "invalid_field"} <= seen


JSON = st.recursive(
    st.sampled_from(VALUES) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=6),
    max_leaves=25,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(value=JSON, route=st.sampled_from([SCORE, CHAT, V0_SCORE]), trusted=st.booleans())
def test_any_json(value: Any, route: str, trusted: bool, prep: Preprocessor) -> None:
    check(prep, json.dumps(value).encode(), route, trusted)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_cut_and_flipped_bytes(data: st.DataObject, prep: Preprocessor) -> None:
    raw = bytearray(json.dumps(data.draw(st.sampled_from(bodies()))).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    end = data.draw(st.just(len(raw)) | st.integers(0, len(raw)))
    check(prep, bytes(raw[:end]), SCORE, trusted=True)
