"""From bytes in to error out: the codes of the 400 and 413 rows that a request can cause on this server."""

import gzip
import json
from typing import Any

import pytest

from spinf_serve.protocol.errors import STATUS_OF_CODE, RequestError
from tests.support.requests import REQUEST_ID, body, header, item, limited, preprocessor, query, refusal, to_bytes
from workers.preprocess.preprocessor import CHAT, Preprocessor, error_body
from workers.preprocess.tokenizer import ContentTokenizer

PLACES = query(template="{x}?{?}", combinations=[{"x": "a"}])
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}

CASES: list[tuple[str, Any, str | None]] = [
    ("invalid_json", b"{", None),
    ("invalid_field", body(endpoint=""), "endpoint"),
    ("invalid_template", body(query("{")), "scoring.queries.0.template"),
    (
        "unknown_placeholder",
        body(PLACES | {"combinations": [{"x": "a", "y": "b"}]}),
        "scoring.queries.0.combinations.0.y",
    ),
    ("missing_value", body(PLACES | {"combinations": [{}]}), "scoring.queries.0.combinations.0.x"),
    ("too_many_options", body(query(options=[])), "scoring.queries.0.options"),
    ("duplicate_option", body(query(options=["a", "A"])), "scoring.queries.0.options.1"),
    ("option_too_long", body(query(options=[" yes", " x" * 30])), "scoring.queries.0.options.1"),
    ("option_boundary", body(query("Is it? {?}", [" yes"])), "scoring.queries.0.options.0"),
    ("too_many_combinations", body(PLACES | {"combinations": [{"x": "a"}] * 1001}), "scoring.queries.0.combinations"),
    (
        "too_many_prompts",
        body(*[PLACES | {"id": str(i), "combinations": [{"x": "a"}] * 1000} for i in range(11)]),
        "scoring.queries",
    ),
    ("duplicate_id", {"inputs": [item("a"), item("a")], "scoring": {"queries": [query()]}}, "inputs.1.id"),
    (
        "unknown_query_id",
        {"inputs": [item("a", query_ids=["x"])], "scoring": {"queries": [query()]}},
        "inputs.0.query_ids.0",
    ),
    ("empty_queries", body(scoring={}), "scoring.queries"),
    ("content_too_long", body(content="word " * 5000), "messages"),
    (
        "content_too_long",
        {"inputs": [item("a"), item("b", "word " * 5000)], "scoring": {"queries": [query()]}},
        "inputs.1.messages",
    ),
    ("template_too_long", body(query("word " * 300 + "{?}")), "scoring.queries.0.template"),
    ("unsupported_content", body(content=[{"type": "file"}]), "messages.0.content.0"),
    ("model_not_served", body(model="other"), "model"),
    ("media_not_supported", body(content=[IMAGE]), "messages.0.content.0"),
    ("extraction_disabled", body({"id": "q", "template": "{n}"}), "scoring.queries.0.template"),
    ("unknown_pack", body(scoring={"packs": [{"id": "a/b"}], "queries": [query()]}), "scoring.packs.0.id"),
]


@pytest.mark.parametrize(("code", "value", "param"), CASES)
def test_refused(code: str, value: Any, param: str | None, prep: Preprocessor) -> None:
    assert refusal(prep, value) == (code, param)
    assert STATUS_OF_CODE[code] == 400


def test_scoring_required_on_the_chat_route(prep: Preprocessor) -> None:
    value = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
    assert refusal(prep, value, header(CHAT)) == ("scoring_required", "scoring")
    assert refusal(prep, value) == ("empty_queries", "scoring.queries")


def test_body_too_large(tokenizer: ContentTokenizer) -> None:
    prep = preprocessor(tokenizer, max_body_bytes=5000)
    packed = gzip.compress(to_bytes(body(content=" " * 6000)))
    assert refusal(prep, packed, header(encoding="gzip")) == ("body_too_large", None)
    assert refusal(prep, body(content=" " * 6000)) == ("body_too_large", None)
    assert refusal(prep, body(), header(encoding="br"))[0] == "invalid_field"


def test_request_too_large(tokenizer: ContentTokenizer) -> None:
    value = body(content="Yes.")
    tokens = preprocessor(tokenizer).prepare(to_bytes(value), header()).log["tokens"]
    assert refusal(preprocessor(tokenizer, limited(max_processed_tokens=tokens)), value) == ("", None)
    assert refusal(preprocessor(tokenizer, limited(max_processed_tokens=tokens - 1)), value) == (
        "request_too_large",
        None,
    )


def test_content_and_longest_question_over_max_tokens(tokenizer: ContentTokenizer) -> None:
    short, long = query("\nIs it?{?}", id="s"), query("\nIs it really so, or not so?{?}", [" yes no yes"], id="l")
    value = {"inputs": [item("a", "One two."), item("b", "One two three four.")], "scoring": {"queries": [short, long]}}
    plan = preprocessor(tokenizer).prepare(to_bytes(value), header()).plan
    depth = [0] * len(plan.tokens)
    for row, parent in enumerate(plan.parents.tolist()):
        depth[row] = depth[parent] + 1 if parent >= 0 else 1
    longest = [
        max(depth[s:e]) for s, e in zip(plan.job_offsets[:2].tolist(), plan.job_offsets[1:3].tolist(), strict=True)
    ]
    assert refusal(preprocessor(tokenizer, max_tokens=longest[1]), value) == ("", None)
    assert refusal(preprocessor(tokenizer, max_tokens=longest[1] - 1), value) == (
        "content_too_long",
        "inputs.1.messages",
    )
    assert refusal(preprocessor(tokenizer, max_tokens=longest[0] - 1), value) == (
        "content_too_long",
        "inputs.0.messages",
    )


@pytest.mark.parametrize("limit", ["max_content_tokens", "max_query_tokens", "max_option_tokens", "max_options"])
def test_limits_are_exact(limit: str, tokenizer: ContentTokenizer) -> None:
    value = body(query("\nIs it?{?}", [" yes no", " no yes"]), content="One two.")
    count = {
        "max_content_tokens": len(tokenizer.encode("One two.")),
        "max_query_tokens": len(tokenizer.encode("\nIs it?")),
        "max_option_tokens": len(tokenizer.encode(" yes no")),
        "max_options": 2,
    }[limit]
    code = {
        "max_content_tokens": "content_too_long",
        "max_query_tokens": "template_too_long",
        "max_option_tokens": "option_too_long",
        "max_options": "too_many_options",
    }[limit]
    assert refusal(preprocessor(tokenizer, limited(**{limit: count})), value)[0] == ""
    assert refusal(preprocessor(tokenizer, limited(**{limit: count - 1})), value)[0] == code


class Untouchable:
    """A tokenizer that must not be asked to encode anything long."""

    def __init__(self, tokenizer: ContentTokenizer) -> None:
        self.inner, self.bos_id, self.max_token_bytes = tokenizer, tokenizer.bos_id, tokenizer.max_token_bytes
        self.clean_start = tokenizer.clean_start

    def encode(self, text: str) -> list[int]:
        assert len(text) < 1000
        return self.inner.encode(text)

    def clean_cut(self, text: str) -> int | None:
        assert len(text) < 1000
        return self.inner.clean_cut(text)


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (body(content="a" * 100_000), "content_too_long"),
        (body(content="é" * 13_000), "content_too_long"),
        (body(query("a" * 100_000 + "{?}")), "template_too_long"),
        (body(query(options=["a" * 100_000])), "option_too_long"),
        (body(query("{x}" * 100_000 + "{?}", combinations=[{"x": "v" * 256}] * 9)), "template_too_long"),
    ],
)
def test_length_is_bounded_before_tokenizing(value: Any, code: str, tokenizer: ContentTokenizer) -> None:
    prep = preprocessor(Untouchable(tokenizer), limited(max_content_tokens=1000), max_body_bytes=1 << 24)
    assert refusal(prep, value)[0] == code


def test_templates_after_one_that_is_too_long_are_not_tokenized(tokenizer: ContentTokenizer) -> None:
    inner = Untouchable(tokenizer)
    prep, seen = preprocessor(inner), list[int]()
    inner.clean_start = lambda text: seen.append(len(text)) or tokenizer.clean_start(text)  # type: ignore[func-returns-value]
    rows = [{"x": f"{i} " * 20} for i in range(10, 99)]
    assert refusal(prep, body(query("{x}" * 9 + ":{?}", combinations=rows)))[0] == "template_too_long"
    assert sum(length > 100 for length in seen) == 1


def test_more_prompts_than_tokens_are_refused_before_they_are_filled(tokenizer: ContentTokenizer) -> None:
    values = {name: [str(i) for i in range(10)] for name in "abc"}
    wide = query("{a}{b}{c}?{?}", combinations="all", values=values)
    inputs = [item(str(i), queries=[wide | {"id": "o"}, wide | {"id": "w"}]) for i in range(1100)]
    closed = Untouchable(tokenizer)
    closed.encode = lambda text: pytest.fail("something was tokenized")  # type: ignore[method-assign]
    prep = preprocessor(closed, max_body_bytes=1 << 24)
    assert refusal(prep, {"inputs": inputs, "scoring": {}}) == ("request_too_large", None)
    assert refusal(prep, {"inputs": inputs, "scoring": {}, "model": "other"}) == ("model_not_served", "model")


@pytest.mark.parametrize(
    ("template", "option", "advice"),
    [
        ("Is it? {?}", " yes", "drop the space before {?}, and keep the one at the option's start"),
        ("Is it? {?}", "yes", "drop the space before {?}, and start the option with a space"),
        ("y{?}", "es", "end the template at the end of a word"),
    ],
)
def test_option_boundary_says_which_space_to_drop(template: str, option: str, advice: str, prep: Preprocessor) -> None:
    with pytest.raises(RequestError) as error:
        prep.prepare(to_bytes(body(query(template, [option]))), header())
    assert error.value.code == "option_boundary"
    assert advice in error.value.message


class TestOrder:
    """Faults that the tokenizer finds take their place among the others."""

    def test_in_options(self, prep: Preprocessor) -> None:
        def params(options: list[Any], template: str = "Is it? {?}") -> tuple[str, str | None]:
            return refusal(prep, body(query(template, options)))

        assert params([" yes", ""]) == ("option_boundary", "scoring.queries.0.options.0")
        assert params(["", " yes"]) == ("invalid_field", "scoring.queries.0.options.0")
        assert params(["x" * 200, " yes"]) == ("option_too_long", "scoring.queries.0.options.0")
        assert params([" yes", "x" * 200]) == ("option_boundary", "scoring.queries.0.options.0")
        assert params([" yes", " yes"]) == ("option_boundary", "scoring.queries.0.options.0")
        assert params(["<b>", " yes"]) == ("option_boundary", "scoring.queries.0.options.1")

    def test_over_combinations(self, prep: Preprocessor) -> None:
        """The earliest option, although a later combination finds it."""
        rows = [{"x": "Is it: "}, {"x": "ye"}]
        value = body({"id": "q", "template": "{x}{?}", "combinations": rows, "options": ["s", " no"]})
        assert refusal(prep, value) == ("option_boundary", "scoring.queries.0.options.0")
        value["scoring"]["queries"][0]["combinations"].append(5)
        assert refusal(prep, value)[1] == "scoring.queries.0.combinations.2"

    def test_options_before_a_template_that_is_too_long(self, prep: Preprocessor) -> None:
        rows = [{"x": "word " * 40}, {"x": "word " * 51}, {"x": "Is it: "}]
        value = {"id": "q", "options": [" no"], "template": "{x}" * 29 + "{?}", "combinations": rows[:2]}
        assert refusal(prep, body(value | {"combinations": rows})) == ("option_boundary", "scoring.queries.0.options.0")
        assert refusal(prep, body(value | {"options": ["<b>"]}))[0] == "template_too_long"

    def test_among_fields(self, prep: Preprocessor) -> None:
        options, template = [" yes"], "word " * 300 + "Is it? {?}"
        first = {"id": "q", "options": options, "template": template, "group": 5}
        assert refusal(prep, body(first))[0] == "option_boundary"
        first = {"id": "q", "template": template, "options": options, "group": 5}
        assert refusal(prep, body(first))[0] == "template_too_long"
        first = {"id": "q", "options": [" x" * 30], "template": template, "group": 5}
        assert refusal(prep, body(first))[0] == "option_too_long"
        first = {"group": 5, "id": "q", "options": [" x" * 30], "template": template}
        assert refusal(prep, body(first))[0] == "invalid_field"

    def test_contents_and_queries(self, prep: Preprocessor) -> None:
        long, bad = [{"content": "word " * 5000}], {"queries": [query("Is it? {?}")]}
        assert refusal(prep, {"messages": long, "scoring": bad})[0] == "content_too_long"
        assert refusal(prep, {"scoring": bad, "messages": long})[0] == "option_boundary"
        assert refusal(prep, {"model": "x", "messages": long, "scoring": bad})[0] == "model_not_served"
        assert refusal(prep, {"messages": long, "model": "x", "scoring": bad})[0] == "content_too_long"
        part = [{"content": ["x"]}]
        inputs = [{"id": "a", "messages": long}, {"id": "b", "messages": part}]
        assert refusal(prep, {"inputs": inputs, "scoring": bad})[0] == "content_too_long"
        assert refusal(prep, {"inputs": inputs[::-1], "scoring": bad})[0] == "unsupported_content"

    def test_a_shared_query_that_no_input_keeps_is_checked_too(self, prep: Preprocessor) -> None:
        scoring = {"queries": [query(), query("Is it? {?}", id="r")]}
        value = {"inputs": [item("a", query_ids=["q"])], "scoring": scoring}
        assert refusal(prep, value) == ("option_boundary", "scoring.queries.1.options.0")


def test_the_envelope() -> None:
    error = RequestError("option_boundary", "drop a space", "scoring.queries.0.options.0")
    got = json.loads(error_body(error, header()))
    fields = {"code": error.code, "message": error.message, "param": error.param}
    assert got == {"error": {"type": "invalid_request", **fields}, "request_id": REQUEST_ID}
    trusted = header(trusted=True)
    assert json.loads(error_body(error, trusted)) == got | {"rejected": fields}
    assert "rejected" not in json.loads(error_body(RequestError("engine_error", "x"), trusted))
    for unexpected in (MemoryError(), ValueError("a secret")):
        got = json.loads(error_body(unexpected, trusted))
        assert (got["error"]["code"], got["error"]["type"]) == ("engine_error", "api_error")
        assert "secret" not in json.dumps(got)
