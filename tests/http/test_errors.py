"""Every error code of the table that a request can meet today, from a real request over HTTP."""

import json
from typing import Any

import pytest

from spinf_serve.protocol.errors import STATUS_OF_CODE
from tests.support.server import QUESTION, ServerProcess, body_of

MESSAGES = [{"content": "hello world"}]


def asked(**changes: Any) -> dict[str, Any]:
    """A request with one question, changed."""
    return body_of(queries=[{**QUESTION, **changes}])


CASES: dict[str, list[tuple[Any, str | None]]] = {
    "invalid_json": [
        (b"", None),
        (b"{", None),
        (b'{"a": NaN}', None),
        (b'{"a": 1, "a": 2}', None),
        (b'{"a": "\\ud800"}', None),
        (b"\xff\xfe", None),
        (b"{} x", None),
    ],
    "invalid_field": [
        (b"[]", "body"),
        ({"scoring": {"queries": [QUESTION]}}, "messages"),
        ({**body_of(), "inputs": []}, "messages"),
        ({"messages": [], "scoring": {"queries": [QUESTION]}}, "messages"),
        ({**body_of(), "stream": True}, "stream"),
        (asked(nope=1), "scoring.queries.0.nope"),
    ],
    "invalid_template": [
        (asked(template=" no slot"), "scoring.queries.0.template"),
        (asked(template=" {?} and more"), "scoring.queries.0.template"),
        (asked(template=" {a b}{?}"), "scoring.queries.0.template"),
    ],
    "unknown_placeholder": [(asked(template=" X{?}", combinations=[{"x": "1"}]), "scoring.queries.0.combinations.0.x")],
    "missing_value": [
        (asked(template=" {x}{?}"), None),
        (body_of(queries=[{"id": "q", "template": " Is it?{?}"}]), "scoring.queries.0.options"),
    ],
    "too_many_options": [(asked(options=[]), "scoring.queries.0.options")],
    "duplicate_option": [(asked(options=[" yes", " YES"]), "scoring.queries.0.options.1")],
    "option_too_long": [(asked(options=[" yes no yes no yes no yes no"]), "scoring.queries.0.options.0")],
    "option_boundary": [(asked(template=" Answer: {?}", options=[" yes"]), "scoring.queries.0.options.0")],
    "too_many_combinations": [
        (
            asked(template=" {a} {b}{?}", combinations="all", values={k: [str(i) for i in range(40)] for k in "ab"}),
            "scoring.queries.0.combinations",
        )
    ],
    "duplicate_id": [(body_of(queries=[QUESTION, QUESTION]), "scoring.queries.1.id")],
    "unknown_query_id": [
        (
            {
                "inputs": [{"id": "a", "messages": MESSAGES, "query_ids": ["other"]}],
                "scoring": {"queries": [QUESTION]},
            },
            "inputs.0.query_ids.0",
        )
    ],
    "empty_queries": [({"messages": MESSAGES, "scoring": {"queries": []}}, None)],
    "content_too_long": [(body_of("hello world " * 3000), None)],
    "template_too_long": [(asked(template=" hello world" * 200 + "{?}"), "scoring.queries.0.template")],
    "unsupported_content": [
        ({"messages": [{"content": [{"type": "smell"}]}], "scoring": {"queries": [QUESTION]}}, None)
    ],
    "model_not_served": [(body_of(model="somebody/else"), "model")],
    "media_not_supported": [
        (
            {
                "messages": [{"content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}],
                "scoring": {"queries": [QUESTION]},
            },
            None,
        )
    ],
    "extraction_disabled": [
        ({"messages": MESSAGES, "scoring": {"queries": [{"id": "n", "template": " N:{n}"}]}}, None)
    ],
    "unknown_pack": [
        ({"messages": MESSAGES, "scoring": {"packs": [{"id": "spinf/moderation"}]}}, "scoring.packs.0.id"),
    ],
    "request_too_large": [
        (
            {
                "inputs": [{"id": str(i), "messages": [{"content": "hello world " * 300}]} for i in range(15)],
                "scoring": {"queries": [QUESTION]},
            },
            None,
        )
    ],
    "too_many_prompts": [
        (
            {
                "messages": MESSAGES,
                "scoring": {
                    "queries": [
                        {
                            "id": str(i),
                            "template": " {a} {b}{?}",
                            "options": [" yes"],
                            "combinations": "all",
                            "values": {key: [str(n) for n in range(30)] for key in "ab"},
                        }
                        for i in range(12)
                    ]
                },
            },
            None,
        )
    ],
}


@pytest.mark.parametrize(
    ("code", "body", "param"),
    [
        pytest.param(code, body, param, id=f"{code}-{i}")
        for code, cases in CASES.items()
        for i, (body, param) in enumerate(cases)
    ],
)
def test_code(open_server: ServerProcess, code: str, body: Any, param: str | None) -> None:
    answer = open_server.post(body)
    envelope = answer.json()
    assert envelope["error"]["code"] == code, envelope
    assert answer.status_code == STATUS_OF_CODE[code]
    assert envelope["error"]["type"] == "invalid_request"
    assert len(envelope["error"]["message"]) < 500
    assert envelope.keys() == {"error", "request_id"}
    assert envelope["request_id"] == answer.headers["x-request-id"]
    if param is not None:
        assert envelope["error"]["param"] == param


def test_other_codes_have_their_own_tests() -> None:
    """Of the whole table only codes of parts that this server does not have cannot be met."""
    elsewhere = {
        "scoring_required",  # test_routes
        "reserved_group",  # test_packs
        *("invalid_token", "not_found", "method_not_allowed", "body_too_large", "concurrency_limit"),
        *("engine_error", "warming_up", "model_unavailable"),  # tests/processes
    }
    packs = {code for code in STATUS_OF_CODE if "pack" in code} | {"unknown_category"}  # test_packs
    not_built = {
        *("unsupported_option", "too_many_extractions", "media_disabled", "invalid_media"),
        "generation_disabled",
    }
    assert set(STATUS_OF_CODE) - packs <= set(CASES) | elsewhere | not_built


def test_one_bad_request_leaves_the_others_alone(open_server: ServerProcess) -> None:
    expected = open_server.post(body_of()).json()["results"]
    for cases in CASES.values():
        for body, _param in cases[:1]:
            assert open_server.post(body).status_code < 500
    assert open_server.post(body_of()).json()["results"] == expected


def test_awkward_but_valid_bodies(open_server: ServerProcess) -> None:
    """What clients send besides: byte order mark, unknown fields, an Authorization header on an open server."""
    body = json.dumps({**body_of(), "temperature": 0.5, "tools": [], "user": "x"}).encode()
    for content in (b"\xef\xbb\xbf" + body, b"\n " + body + b"\r\n"):
        answer = open_server.post(content, headers={"authorization": "Basic anything", "content-type": "text/plain"})
        assert answer.status_code == 200
