"""The decided edge cases of the API that concern bodies, and models without a `<bos>`."""

import gzip
import json
import zlib
from typing import Any

import pytest

from tests.preprocess.test_scores import check_plan
from tests.support.fake_engine import paths_of
from tests.support.oracle import assert_close, expected_results
from tests.support.requests import answer, body, header, item, preprocessor, query, refusal, to_bytes
from workers.preprocess.encoder import Encoder
from workers.preprocess.join import FilledTemplate, cut_content
from workers.preprocess.preprocessor import V0_SCORE, Preprocessor
from workers.preprocess.tokenizer import ContentTokenizer


def results(prep: Preprocessor, value: Any, encoding: str | None = None) -> Any:
    return answer(prep, value, header(encoding=encoding))["results"]


def test_encodings_of_one_body_give_one_answer(prep: Preprocessor) -> None:
    raw = to_bytes(body(content="Ünïcode 😀"))
    plain = results(prep, raw)
    wide = json.dumps(json.loads(raw), ensure_ascii=False).encode()
    assert results(prep, wide) == plain
    assert results(prep, b"\xef\xbb\xbf" + raw) == plain
    assert results(prep, gzip.compress(raw), "gzip") == plain
    assert results(prep, zlib.compress(raw), "deflate") == plain
    assert refusal(prep, raw, header(encoding="zstd")) == ("invalid_field", None)
    assert refusal(prep, raw, header(encoding="gzip")) == ("invalid_json", None)


def test_every_character_is_content(prep: Preprocessor, tokenizer: ContentTokenizer) -> None:
    """U+0000 is scored as sent, and nothing is normalised: composed and decomposed é are two contents."""
    contents = ["a\0b", "ab", "\u00e9", "e\u0301", "\r\n", "\n", "\ufeff", " ", "<bos>", "<start_of_turn>", "\u2028"]
    value = {"inputs": [item(str(i), text) for i, text in enumerate(contents)], "scoring": {"queries": [query()]}}
    got = answer(prep, value)
    rows = [json.dumps(result["queries"]) for result in got["results"]]
    assert len(set(rows)) == len(rows)
    plan = prep.prepare(to_bytes(value), header()).plan
    assert not tokenizer.special_ids & set(plan.tokens.tolist()) - {tokenizer.bos_id}
    assert plan.tokens.tolist().count(tokenizer.bos_id) == len(plan.prefix_lens)


@pytest.mark.parametrize("nested", ["[", '{"a":'])
def test_deep_nesting(nested: str, prep: Preprocessor) -> None:
    close = {"[": "]", '{"a":': "}"}[nested]
    for depth in (900, 5000, 50_000, 200_000):
        raw = to_bytes(body())[:-1] + b',"metadata":' + nested.encode() * depth + b"1" + close.encode() * depth + b"}"
        assert refusal(prep, raw)[0] in ("", "invalid_json")
    assert refusal(prep, raw)[0] == "invalid_json"


def test_stream(prep: Preprocessor) -> None:
    assert refusal(prep, body(stream=True)) == ("invalid_field", "stream")
    for value in (False, None):
        assert refusal(prep, body(stream=value)) == ("", None)


def test_limits_of_untrusted_callers_are_ignored(prep: Preprocessor) -> None:
    value = body(limits={"max_options": "1"}, features={"extraction": "x"})
    assert refusal(prep, value) == ("", None)
    assert refusal(prep, value, header(trusted=True))[0] == "invalid_field"
    capped = body(limits={"max_content_tokens": 1})
    assert refusal(prep, capped) == ("", None)
    assert refusal(prep, capped, header(trusted=True))[0] == "content_too_long"


def test_ten_thousand_prompts(prep: Preprocessor) -> None:
    rows = [[{"x": f"{i} {j}"} for j in range(1000)] for i in range(10)]
    value = body(*[query("{x}:{?}", [" yes", " no"], id=str(i), combinations=r) for i, r in enumerate(rows)])
    prepared = prep.prepare(to_bytes(value), header())
    assert prepared.log["prompts"] == 10_000


@pytest.mark.parametrize("content", ["", "One.", "ab", "Answer", "Is it so: y"])
@pytest.mark.parametrize("template", ["{?}", "s{?}", " is{?}", "\n{?}", "er: {x}{?}"])
def test_joins_are_the_whole_strings(
    content: str, template: str, prep: Preprocessor, tokenizer: ContentTokenizer
) -> None:
    fields = {"combinations": [{"x": "a"}, {"x": " b"}]} if "{x}" in template else {}
    value = body(query(template, [" yes", " no"], **fields), content=content)
    got = answer(prep, value)
    assert got["warnings"] == []
    assert_close(got["results"], expected_results(value, tokenizer.encode, [2]))


def test_cut_contents_and_split_templates(tokenizer: ContentTokenizer) -> None:
    encoder = Encoder(tokenizer)
    texts = ["", "a", "Answer: yes", "word " * 99, "x" * 300 + " the end", "\n\n\n", "é是😀", "Is it the"]
    for left in texts:
        content = cut_content(left, encoder)
        assert content.tokens == len(tokenizer.encode(left))
        assert content.merged
        for right in texts:
            template = FilledTemplate.split(right, encoder)
            assert list(content.prefix + template.after(content.tail, encoder)) == tokenizer.encode(left + right)


class WithoutBos:
    """The tiny tokenizer of a model that reads no `<bos>`."""

    bos_id = None

    def __init__(self, tokenizer: ContentTokenizer) -> None:
        self.encode, self.clean_cut = tokenizer.encode, tokenizer.clean_cut
        self.clean_start, self.max_token_bytes = tokenizer.clean_start, tokenizer.max_token_bytes


class TestWithoutBos:
    @pytest.fixture
    def bare(self, tokenizer: ContentTokenizer) -> Preprocessor:
        return preprocessor(WithoutBos(tokenizer))

    def test_the_slot_needs_text_before_it(self, bare: Preprocessor, prep: Preprocessor) -> None:
        bad = body(query(), query("{?}", id="r"))
        assert refusal(bare, bad) == ("invalid_field", "scoring.queries.1.template")
        assert (
            refusal(bare, body(query("{x}{?}", combinations=[{"x": "a"}, {"x": ""}])))[1]
            == "scoring.queries.0.template"
        )
        assert refusal(prep, bad) == ("", None)

    def test_numbers_are_the_definitions(self, bare: Preprocessor, tokenizer: ContentTokenizer) -> None:
        queries = [query(), query("\nIs it{?}", id="r", group="g"), query("And{?}", id="s"), query("\n{?}", id="t")]
        value = {"inputs": [item("a", ""), item("b", "ab"), item("c", "One two.")], "scoring": {"queries": queries}}
        plan = bare.prepare(to_bytes(value), header()).plan
        check_plan(plan)
        assert 2 not in plan.tokens
        assert_close(answer(bare, value)["results"], expected_results(value, tokenizer.encode, []))

    def test_jobs(self, bare: Preprocessor, tokenizer: ContentTokenizer) -> None:
        job = {"id": "a", "prompts": ["One", "Is it", "One more"], "options": [["a"], ["b"], ["c"]]}
        prepared = bare.prepare(to_bytes({"jobs": [job]}), header(V0_SCORE))
        check_plan(prepared.plan)
        read = {paths_of(prepared.plan)[row] for row in prepared.plan.read_rows.tolist()}
        assert read == {tuple(tokenizer.encode(p)) for p in job["prompts"]}
        got = answer(bare, {"jobs": [job]}, header(V0_SCORE))["results"][0]
        assert (got["trees"], len(got["logprobs"])) == (2, 3)
        empty = {"jobs": [job | {"prompts": ["One", "", "x"]}]}
        assert refusal(bare, empty, header(V0_SCORE)) == ("invalid_field", "jobs.0.prompts.1")
