"""The wire format, without a tokenizer: every rule of the tables, one fault at a time."""

import json
from typing import Any

import pytest

from spinf_serve.config import Limits
from spinf_serve.protocol.errors import RequestError
from spinf_serve.protocol.request import ScoreRequest, read_request
from tests.support.requests import MODEL, body, item, limited, query

SHARED = {"queries": [query(id="a"), query(id="b")]}


def read(value: Any, limits: Limits | None = None, **kwargs: bool) -> ScoreRequest:
    request = read_request(value, MODEL, limits or Limits(), **kwargs)
    request.faults.check()
    return request


def fault(value: Any, limits: Limits | None = None, **kwargs: bool) -> tuple[str, str | None]:
    with pytest.raises(RequestError) as error:
        read(value, limits, **kwargs)
    assert 0 < len(error.value.message) < 500
    return error.value.code, error.value.param


def in_query(**fields: Any) -> dict[str, Any]:
    """A body whose only query has these fields; None takes a field away."""
    merged = query() | fields
    return body({name: value for name, value in merged.items() if value is not ...})


TOP = [
    (3, "invalid_field", "body"),
    ([], "invalid_field", "body"),
    ({}, "invalid_field", "messages"),
    ({"scoring": SHARED}, "invalid_field", "messages"),
    (body() | {"inputs": [item("a")]}, "invalid_field", "messages"),
    (body(messages=[]), "invalid_field", "messages"),
    (body(messages={}), "invalid_field", "messages"),
    (body(messages=None), "invalid_field", "messages"),
    ({"inputs": [], "scoring": SHARED}, "invalid_field", "inputs"),
    ({"inputs": {}, "scoring": SHARED}, "invalid_field", "inputs"),
    ({"inputs": [3], "scoring": SHARED}, "invalid_field", "inputs.0"),
    (body(stream=True), "invalid_field", "stream"),
    (body(stream="yes"), "invalid_field", "stream"),
    (body(model="gpt-4"), "model_not_served", "model"),
    (body(model=""), "model_not_served", "model"),
    (body(model=5), "invalid_field", "model"),
    (body(model=None), "invalid_field", "model"),
    (body(endpoint=""), "invalid_field", "endpoint"),
    (body(endpoint="e" * 129), "invalid_field", "endpoint"),
    (body(endpoint=1), "invalid_field", "endpoint"),
    (body(scoring=[]), "invalid_field", "scoring"),
    (body(scoring=None), "invalid_field", "scoring"),
    (body(scoring={}), "empty_queries", "scoring.queries"),
    (body(scoring={"queries": []}), "empty_queries", "scoring.queries"),
    ({"messages": [{"content": ""}]}, "empty_queries", "scoring.queries"),
    (body(scoring={"queries": {}}), "invalid_field", "scoring.queries"),
    (body(scoring={"queries": [1]}), "invalid_field", "scoring.queries.0"),
    (body(scoring={"queries": None}), "invalid_field", "scoring.queries"),
    (body(scoring=SHARED | {"query": 1}), "invalid_field", "scoring.query"),
    (body(scoring=SHARED | {"empty_floor": 1}), "invalid_field", "scoring.empty_floor"),
    (body(scoring=SHARED | {"case_insensitive": "no"}), "invalid_field", "scoring.case_insensitive"),
    (body(scoring=SHARED | {"packs": {}}), "invalid_field", "scoring.packs"),
    (body(scoring=SHARED | {"packs": ["a/b"]}), "invalid_field", "scoring.packs.0"),
    (body(scoring=SHARED | {"packs": [{}]}), "invalid_field", "scoring.packs.0.id"),
    (body(scoring=SHARED | {"packs": [{"id": "a/b"}]}), "unknown_pack", "scoring.packs.0.id"),
    (body(scoring=SHARED | {"packs": [{"x": 1, "id": "a/b"}]}), "invalid_field", "scoring.packs.0.x"),
    (body(scoring={"packs": [{"id": "a/b"}], "queries": []}), "unknown_pack", "scoring.packs.0.id"),
]


@pytest.mark.parametrize(("value", "code", "param"), TOP)
def test_top_level(value: Any, code: str, param: str) -> None:
    assert fault(value) == (code, param)


CONTENT = [
    (["hi"], "unsupported_content", "messages.0.content.0"),
    ([{}], "unsupported_content", "messages.0.content.0"),
    ([{"type": "file", "file": {}}], "unsupported_content", "messages.0.content.0"),
    ([{"type": ["text"]}], "unsupported_content", "messages.0.content.0"),
    ([{"type": "text"}], "invalid_field", "messages.0.content.0.text"),
    ([{"type": "text", "text": ["a"]}], "invalid_field", "messages.0.content.0.text"),
    (3, "invalid_field", "messages.0.content"),
    (None, "invalid_field", "messages.0.content"),
    ([{"type": "image_url"}], "invalid_field", "messages.0.content.0.image_url"),
    ([{"type": "image_url", "image_url": {"url": 1}}], "invalid_field", "messages.0.content.0.image_url.url"),
    (
        [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA", "detail": "huge"}}],
        "invalid_field",
        "messages.0.content.0.image_url.detail",
    ),
    (
        [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}],
        "media_not_supported",
        "messages.0.content.0",
    ),
    (
        [{"type": "image_url", "image_url": {"url": "https://x.org/a.png"}}],
        "unsupported_content",
        "messages.0.content.0",
    ),
    ([{"type": "image_url", "image_url": {"url": " HTTP://x"}}], "unsupported_content", "messages.0.content.0"),
    (
        [{"type": "text", "text": "a"}, {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}],
        "media_not_supported",
        "messages.0.content.1",
    ),
    (
        [{"type": "input_audio", "input_audio": {"data": "AA"}}],
        "invalid_field",
        "messages.0.content.0.input_audio.format",
    ),
    ([{"type": "video", "video": {"frames": []}}], "invalid_field", "messages.0.content.0.video.frames"),
    (
        [{"type": "video", "video": {"frames": [{"t": True, "image_url": {"url": "data:,"}}]}}],
        "invalid_field",
        "messages.0.content.0.video.frames.0.t",
    ),
    (
        [{"type": "video", "video": {"frames": [{"t": 0, "image_url": {"url": "data:,"}}]}}],
        "media_not_supported",
        "messages.0.content.0",
    ),
    (
        [{"type": "video", "video": {"frames": [{"t": 0, "image_url": {"url": "//cdn/x.png"}}]}}],
        "unsupported_content",
        "messages.0.content.0.video.frames.0",
    ),
]


@pytest.mark.parametrize(("content", "code", "param"), CONTENT)
def test_content(content: Any, code: str, param: str) -> None:
    assert fault(body(content=content)) == (code, param)


def test_messages_must_be_objects_with_content() -> None:
    assert fault(body(messages=["hi"])) == ("invalid_field", "messages.0")
    assert fault(body(messages=[{"role": "user"}])) == ("invalid_field", "messages.0.content")
    assert fault(body(messages=[{"content": "a"}, {"content": "b", "role": 1}])) == ("invalid_field", "messages.1.role")


QUERY = [
    ({"id": ...}, "invalid_field", "id"),
    ({"id": 7}, "invalid_field", "id"),
    ({"id": "i" * 129}, "invalid_field", "id"),
    ({"template": ...}, "invalid_field", "template"),
    ({"template": 1}, "invalid_field", "template"),
    ({"template": "no slot"}, "invalid_template", "template"),
    ({"template": "{?} more"}, "invalid_template", "template"),
    ({"option": [" a"]}, "invalid_field", "option"),
    ({"group": "g" * 129}, "invalid_field", "group"),
    ({"group": None}, "invalid_field", "group"),
    ({"empty_floor": "true"}, "invalid_field", "empty_floor"),
    ({"options": ...}, "missing_value", "options"),
    ({"options": None}, "invalid_field", "options"),
    ({"options": "yes"}, "invalid_field", "options"),
    ({"options": []}, "too_many_options", "options"),
    ({"options": [f" {i}" for i in range(1001)]}, "too_many_options", "options"),
    ({"options": [" yes", ""]}, "invalid_field", "options.1"),
    ({"options": [" yes", 1]}, "invalid_field", "options.1"),
    ({"options": [" yes", " no", "YES "]}, "duplicate_option", "options.2"),
    ({"options": ["straße", "STRASSE"]}, "duplicate_option", "options.1"),
    ({"options": [" ", "\n"]}, "duplicate_option", "options.1"),
    ({"max_tokens": 5}, "invalid_field", "max_tokens"),
    ({"top_k": 5}, "invalid_field", "top_k"),
    ({"calibration": {"a": 1, "b": 0}}, "invalid_field", "calibration"),
    ({"generate": True}, "invalid_field", "generate"),
    ({"values": {}}, "invalid_field", "values"),
    ({"template": "{x}?{?}"}, "missing_value", "combinations"),
    ({"template": "{x}?{?}", "combinations": []}, "missing_value", "combinations"),
    ({"template": "{x}?{?}", "combinations": {}}, "invalid_field", "combinations"),
    ({"template": "{x}?{?}", "combinations": "some"}, "invalid_field", "combinations"),
    ({"template": "{x}?{?}", "combinations": ["a"]}, "invalid_field", "combinations.0"),
    ({"template": "{x}?{?}", "combinations": [{"x": "a"}, {}]}, "missing_value", "combinations.1.x"),
    ({"template": "{x}?{?}", "combinations": [{"x": "a", "y": "b"}]}, "unknown_placeholder", "combinations.0.y"),
    ({"combinations": [{"y": "b"}]}, "unknown_placeholder", "combinations.0.y"),
    ({"template": "{x}?{?}", "combinations": [{"x": 1}]}, "invalid_field", "combinations.0.x"),
    ({"template": "{x}?{?}", "combinations": [{"x": "v" * 257}]}, "invalid_field", "combinations.0.x"),
    ({"template": "{x}?{?}", "combinations": [{"x": "a"}] * 1001}, "too_many_combinations", "combinations"),
    ({"template": "{x}?{?}", "combinations": "all"}, "missing_value", "values"),
    ({"template": "{x}?{?}", "combinations": "all", "values": []}, "invalid_field", "values"),
    ({"template": "{x}?{?}", "combinations": "all", "values": {}}, "missing_value", "values.x"),
    ({"template": "{x}?{?}", "combinations": "all", "values": {"x": []}}, "missing_value", "values.x"),
    ({"template": "{x}?{?}", "combinations": "all", "values": {"x": "a"}}, "invalid_field", "values.x"),
    ({"template": "{x}?{?}", "combinations": "all", "values": {"x": ["a", 1]}}, "invalid_field", "values.x.1"),
    ({"template": "{x}?{?}", "combinations": "all", "values": {"x": ["a" * 257]}}, "invalid_field", "values.x.0"),
    (
        {"template": "{x}?{?}", "combinations": "all", "values": {"x": ["a"], "y": ["b"]}},
        "unknown_placeholder",
        "values.y",
    ),
    (
        {"template": "{x}{y}?{?}", "combinations": "all", "values": {"x": ["a"] * 91, "y": ["b"] * 11}},
        "too_many_combinations",
        "combinations",
    ),
]


@pytest.mark.parametrize(("fields", "code", "param"), QUERY)
def test_query(fields: dict[str, Any], code: str, param: str) -> None:
    assert fault(in_query(**fields)) == (code, f"scoring.queries.0.{param}")


SLOT = [
    ({"template": "{n}"}, "extraction_disabled", "template"),
    (
        {"template": "{$}", "max_tokens": 64, "top_k": 20, "calibration": {"a": 1.5, "b": -1}},
        "extraction_disabled",
        "template",
    ),
    ({"template": '"{*}"', "max_tokens": 100, "generate": True}, "extraction_disabled", "template"),
    (
        {"template": '"{*}"', "generate": {"temperature": 0.5, "top_p": 1, "top_k": 100, "seed": 1, "n": 6}},
        "extraction_disabled",
        "template",
    ),
    ({"template": "{n}", "options": [" a"]}, "invalid_field", "options"),
    ({"template": "{n}", "max_tokens": 0}, "invalid_field", "max_tokens"),
    ({"template": "{n}", "max_tokens": 65}, "invalid_field", "max_tokens"),
    ({"template": "{n}", "max_tokens": 5.0}, "invalid_field", "max_tokens"),
    ({"template": "{n}", "max_tokens": True}, "invalid_field", "max_tokens"),
    ({"template": "{n}", "top_k": 21}, "invalid_field", "top_k"),
    ({"template": "{n}", "calibration": {"a": 1}}, "invalid_field", "calibration.b"),
    ({"template": "{n}", "calibration": {"a": 1, "b": 2, "c": 3}}, "invalid_field", "calibration.c"),
    ({"template": "{n}", "calibration": [1, 2]}, "invalid_field", "calibration"),
    ({"template": "{n}", "generate": True}, "invalid_field", "generate"),
    ({"template": "{*}", "generate": False}, "invalid_field", "generate"),
    ({"template": "{*}", "generate": True, "max_tokens": 101}, "invalid_field", "max_tokens"),
    ({"template": "{*}", "generate": True, "top_k": 3}, "invalid_field", "generate"),
    ({"template": "{*}", "generate": {"temperature": 2.1}}, "invalid_field", "generate.temperature"),
    ({"template": "{*}", "generate": {"top_p": 0}}, "invalid_field", "generate.top_p"),
    ({"template": "{*}", "generate": {"n": 7}}, "invalid_field", "generate.n"),
    ({"template": "{*}", "generate": {"beam": 2}}, "invalid_field", "generate.beam"),
]


@pytest.mark.parametrize(("fields", "code", "param"), SLOT)
def test_extraction_slots_are_checked_then_refused(fields: dict[str, Any], code: str, param: str) -> None:
    assert fault(in_query(options=..., **fields) if "options" not in fields else in_query(**fields)) == (
        code,
        f"scoring.queries.0.{param}",
    )


INPUTS = [
    ([{"messages": [{"content": ""}]}], "invalid_field", "inputs.0.id"),
    ([{"id": "a"}], "invalid_field", "inputs.0.messages"),
    ([item("a", messages=[])], "invalid_field", "inputs.0.messages"),
    ([item("i" * 129)], "invalid_field", "inputs.0.id"),
    ([item("a"), item("b"), item("a")], "duplicate_id", "inputs.2.id"),
    ([item("a", content="x", extra=1)], "invalid_field", "inputs.0.extra"),
    ([item("a"), item("b", query_ids=["a", "c"])], "unknown_query_id", "inputs.1.query_ids.1"),
    ([item("a", query_ids=[1])], "invalid_field", "inputs.0.query_ids.0"),
    ([item("a", query_ids="a")], "invalid_field", "inputs.0.query_ids"),
    ([item("a", query_ids=[])], "empty_queries", "inputs.0.query_ids"),
    ([item("a", query_ids=[], queries=[])], "empty_queries", "inputs.0.query_ids"),
    ([item("a", queries=[query(id="a")])], "duplicate_id", "inputs.0.queries.0.id"),
    ([item("a", queries=[query(id="c"), query(id="c")])], "duplicate_id", "inputs.0.queries.1.id"),
    ([item("a", queries=[query(id="c", template="")])], "invalid_template", "inputs.0.queries.0.template"),
    ([item("a", parameters={"who": "x"})], "invalid_field", "inputs.0.parameters.who"),
    ([item("a", parameters=[])], "invalid_field", "inputs.0.parameters"),
]


@pytest.mark.parametrize(("inputs", "code", "param"), INPUTS)
def test_inputs(inputs: list[Any], code: str, param: str) -> None:
    assert fault({"inputs": inputs, "scoring": SHARED}) == (code, param)


def test_duplicate_shared_ids() -> None:
    assert fault(body(query(id="a"), query(id="a"))) == ("duplicate_id", "scoring.queries.1.id")


def test_an_input_without_any_query() -> None:
    value = {"inputs": [item("a", queries=[query()]), item("b")]}
    assert fault(value) == ("empty_queries", "inputs.1.queries")
    assert fault({"inputs": [item("a")], "scoring": {"queries": []}}) == ("empty_queries", "inputs.0.queries")


def test_prompts_per_input() -> None:
    many = query(template="{x}?{?}", combinations=[{"x": str(i)} for i in range(6)])
    assert fault(body(many), limited(max_prompts_per_input=5)) == ("too_many_prompts", "scoring.queries")
    own = {"inputs": [item("a"), item("b", queries=[many | {"id": "c"}])], "scoring": {"queries": [query(id="a")]}}
    assert fault(own, limited(max_prompts_per_input=6)) == ("too_many_prompts", "inputs.1.queries")
    read(own, limited(max_prompts_per_input=7))


def test_the_chat_route_needs_scoring() -> None:
    assert fault({"messages": [{"content": "hi"}]}, needs_scoring=True) == ("scoring_required", "scoring")
    assert fault({"messages": [{"content": "hi"}], "scoring": None}, needs_scoring=True) == (
        "scoring_required",
        "scoring",
    )
    read(body(), needs_scoring=True)


def test_accepted() -> None:
    value = {
        "model": "SMALL-gemma",
        "temperature": 0.5,
        "stream": False,
        "metadata": {"a": None},
        "endpoint": "e" * 128,
        "limits": "ignored",
        "features": 3,
        "inputs": [
            item("", [{"type": "text", "text": "a", "cache": 1}, {"type": "text", "text": "b"}]),
            {
                "id": "i" * 128,
                "messages": [{"role": "system", "content": "x", "name": "n"}, {"content": []}, {"content": "y"}],
            },
            item("c", query_ids=["b", "b"], queries=[query(id="a", group="g")], parameters={}),
        ],
        "scoring": SHARED | {"packs": [], "empty_floor": False},
    }
    request = read(value)
    assert [i.text for i in request.inputs] == ["ab", "x\n\n\n\ny", "A short content."]
    assert [[q.id for q in (*i.shared, *i.own)] for i in request.inputs] == [["a", "b"], ["a", "b"], ["b", "a"]]
    assert (request.model, request.endpoint, request.case_insensitive) == ("SMALL-gemma", "e" * 128, True)
    assert [q.empty_floor for q in request.asked()] == [False] * 3
    assert request.asked()[2].group == "g"


@pytest.mark.parametrize("name", [None, "gemma-3-270m", "GEMMA-3-270M", "demo", "Demo", "./models/gemma"])
def test_names_of_the_served_model(name: str | None) -> None:
    request = read(body(model=name) if name else body())
    assert request.model == name


def test_query_ids_keep_the_order_of_the_shared_queries() -> None:
    shared = {"queries": [query(id=x) for x in "abcd"]}
    request = read({"inputs": [item("1", query_ids=["d", "a", "c"])], "scoring": shared})
    assert [q.id for q in request.inputs[0].shared] == ["a", "c", "d"]
    assert [q.id for q in request.asked()] == ["a", "c", "d"]


def test_single_content_has_input_id_0() -> None:
    assert read(body()).inputs[0].id == "0"


@pytest.mark.parametrize("exact", [[" yes", "Yes"], ["straße", "STRASSE"], [" a", "a"]])
def test_case_sensitive_options_differ_by_case_and_space(exact: list[str]) -> None:
    read(body(scoring={"queries": [query(options=exact)], "case_insensitive": False}))
    assert fault(body(scoring={"queries": [query(options=exact)]}))[0] == "duplicate_option"
    twice = body(scoring={"queries": [query(options=[" a", "b", " a"])], "case_insensitive": False})
    assert fault(twice) == ("duplicate_option", "scoring.queries.0.options.2")


def test_a_template_without_placeholders_has_one_prompt() -> None:
    for fields in (
        {},
        {"combinations": []},
        {"combinations": [{}]},
        {"combinations": "all", "values": {}},
        {"combinations": "all"},
    ):
        assert list(read(in_query(**fields)).shared[0].combinations) == [{}]


def test_the_product_follows_the_template() -> None:
    fields = {"template": "{b}{a}{b}?{?}", "combinations": "all", "values": {"a": ["1", "2"], "b": ["x", "y"]}}
    rows = list(read(in_query(**fields)).shared[0].combinations)
    assert rows == [{"b": "x", "a": "1"}, {"b": "x", "a": "2"}, {"b": "y", "a": "1"}, {"b": "y", "a": "2"}]
    assert list(rows[0]) == ["b", "a"]


def test_a_product_of_many_long_lists_is_not_spelled_out() -> None:
    values = {name: ["v"] * 10_000 for name in "abcde"}
    fields = {"template": "{a}{b}{c}{d}{e}{?}", "combinations": "all", "values": values}
    assert fault(in_query(**fields)) == ("too_many_combinations", "scoring.queries.0.combinations")


class TestTrusted:
    def test_limits_are_capped_by_the_servers(self) -> None:
        limits = read(body(limits={"max_options": 2, "max_query_tokens": 10**9, "other": "x"}), trusted=True).limits
        assert (limits.max_options, limits.max_query_tokens) == (2, Limits().max_query_tokens)
        options = [" a", " b", " c"]
        value = in_query(options=options) | {"limits": {"max_options": 2}}
        assert fault(value, trusted=True) == ("too_many_options", "scoring.queries.0.options")
        read(value, trusted=False)

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"limits": []}, "limits"),
            ({"limits": {"max_options": "2"}}, "limits.max_options"),
            ({"limits": {"max_options": -1}}, "limits.max_options"),
            ({"limits": {"max_options": True}}, "limits.max_options"),
            ({"features": []}, "features"),
            ({"features": {"extraction": 1}}, "features.extraction"),
        ],
    )
    def test_malformed_ones_are_faults_of_trusted_callers_only(self, fields: dict[str, Any], param: str) -> None:
        assert fault(body(**fields), trusted=True) == ("invalid_field", param)
        read(body(**fields))


def test_errors_never_quote_long_input() -> None:
    long = "x" * 100_000
    values = [
        body(model=long),
        body(scoring={"queries": [query()], long: 1}),
        in_query(**{long: 1}),
        in_query(template=long + "{"),
        in_query(template="{" + long + "{?}"),
        in_query(options=[" yes", " yes" + long, " yes" + long]),
        in_query(combinations=[{long: "a"}]),
        {"inputs": [item(long)], "scoring": SHARED},
        {"inputs": [item("a", query_ids=[long])], "scoring": SHARED},
        body(content=[{"type": long}]),
    ]
    for value in values:
        with pytest.raises(RequestError) as error:
            read(value)
        assert len(json.dumps(error.value.envelope("scr_" + "0" * 26))) < 1000
