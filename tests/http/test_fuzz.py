"""Bodies that nobody would write: any answer but a 5xx, and the server serves the next one."""

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.server import ServerProcess, body_of

FUZZ = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
WORDS = ("messages", "content", "scoring", "queries", "id", "template", "options", "combinations", "values", "inputs")
STRINGS = st.one_of(st.text(max_size=12), st.sampled_from([" {?}", "{x}{?}", " yes", "all", "{", "\x00", "q", *WORDS]))
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), STRINGS)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.one_of(st.sampled_from(WORDS), STRINGS), inner, max_size=4)
    ),
    max_leaves=12,
)
VALID: dict[str, Any] = {
    "inputs": [{"id": "a", "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]}],
    "scoring": {
        "queries": [
            {
                "id": "q",
                "template": " {a} {b}{?}",
                "options": [" yes", " no"],
                "combinations": "all",
                "values": {"a": ["x", "y"], "b": ["z"]},
                "group": "g",
            }
        ]
    },
}


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of everything inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, inner in items for place in places(inner, (*path, key)))]


def changed(path: tuple[Any, ...], replacement: Any, *, remove: bool) -> Any:
    """VALID with one place replaced or removed."""
    copy = json.loads(json.dumps(VALID))
    if not path:
        return replacement
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    if remove:
        del inner[path[-1]]
    else:
        inner[path[-1]] = replacement
    return copy


def assert_decided(server: ServerProcess, content: bytes, path: str) -> None:
    answer = server.post(content, path)
    assert answer.status_code in (200, 400, 413), answer.text
    if answer.status_code != 200:
        assert answer.json()["error"]["code"]
        assert len(answer.json()["error"]["message"]) < 500
    assert answer.headers["x-request-id"]


@FUZZ
@given(path=st.sampled_from(places(VALID)), replacement=JSON, remove=st.booleans(), chat=st.booleans())
def test_one_place_changed(
    open_server: ServerProcess, path: tuple[Any, ...], replacement: Any, remove: bool, chat: bool
) -> None:
    route = "/v1/chat/completions" if chat else "/v1/score"
    assert_decided(open_server, json.dumps(changed(path, replacement, remove=remove)).encode(), route)


@FUZZ
@given(JSON)
def test_any_json(open_server: ServerProcess, value: Any) -> None:
    assert_decided(open_server, json.dumps(value).encode(), "/v1/score")


@FUZZ
@given(st.binary(max_size=200), st.integers(0, 400), st.integers(0, 400))
def test_broken_bytes(open_server: ServerProcess, noise: bytes, start: int, end: int) -> None:
    valid = json.dumps(VALID).encode()
    assert_decided(open_server, valid[:start] + noise + valid[end:], "/v1/score")


def test_the_server_survived(open_server: ServerProcess) -> None:
    assert open_server.post(VALID).status_code == 200
    assert open_server.post(body_of()).status_code == 200
    assert open_server.metric("spinf_workers_lost_total") == 0
    assert open_server.metric("spinf_requests_rejected_total", code="engine_error") == 0
    assert "Traceback" not in open_server.log
