"""The primitive of `/v0/score`: whole prompts, no variants, no floors, no rounding."""

from typing import Any

import pytest

from tests.preprocess.test_scores import check_plan
from tests.support.fake_engine import fake_logprob, run_plan
from tests.support.requests import answer, body, header, limited, preprocessor, refusal, to_bytes
from workers.preprocess.preprocessor import V0_SCORE, Preprocessor
from workers.preprocess.tokenizer import ContentTokenizer

V0 = header(V0_SCORE, trusted=True)


def job(job_id: str = "a", prompts: Any = ("Is it? Answer:",), options: Any = ((" yes", " no"),)) -> dict[str, Any]:
    return {"id": job_id, "prompts": list(prompts), "options": [list(o) for o in options]}


def test_numbers_are_the_definitions(prep: Preprocessor, tokenizer: ContentTokenizer) -> None:
    jobs = [
        job(
            "a",
            ["Is it good?", "Is it bad?", "Is it good? And", "Is it"],
            [[" yes", " no yes"], [" no"], [" I"], [" good"]],
        ),
        job("b", [""], [["x", "x"]]),
        job("c", ["Same", "Same"], [["a"], ["b"]]),
    ]
    got = answer(prep, {"jobs": jobs}, V0)
    for sent, result in zip(jobs, got["results"], strict=True):
        assert result["id"] == sent["id"]
        for prompt, options, row in zip(sent["prompts"], sent["options"], result["logprobs"], strict=True):
            path = (2, *tokenizer.encode(prompt))
            for option, value in zip(options, row, strict=True):
                tokens = tokenizer.encode(option)
                expected = sum(fake_logprob((*path, *tokens[:k]), t) for k, t in enumerate(tokens))
                assert value == pytest.approx(expected, rel=1e-12)


def test_the_shared_prefix_is_read_once(prep: Preprocessor, tokenizer: ContentTokenizer) -> None:
    prompts = ["The same words and then one", "The same words and then two"]
    prepared = prep.prepare(to_bytes({"jobs": [job("a", prompts, [["a"], ["b"]])]}), V0)
    check_plan(prepared.plan)
    paths = [(2, *tokenizer.encode(p)) for p in prompts]
    common = next(i for i, (a, b) in enumerate(zip(*paths, strict=False)) if a != b)
    assert prepared.plan.prefix_lens.tolist() == [common]
    assert len(prepared.plan.tokens) == common + sum(len(path) - common for path in paths)
    result = answer(prep, {"jobs": [job("a", prompts, [["a"], ["b"]])]}, V0)["results"][0]
    assert (result["packed_tokens"], result["trees"]) == (len(prepared.plan.tokens), 1)


def test_paths_are_summed_by_position(prep: Preprocessor) -> None:
    """What a job's prompts share depends on the job; a prompt's bits must not. `/v1` cuts by the content alone."""
    assert prep.prepare(to_bytes({"jobs": [job()]}), V0).plan.by_position
    assert not prep.prepare(to_bytes(body()), header()).plan.by_position


def test_the_frame(prep: Preprocessor) -> None:
    got = answer(prep, {"jobs": [job()], "unknown": 1}, V0)
    assert list(got) == ["results", "usage", "timing", "engine"]
    prepared = prep.prepare(to_bytes({"jobs": [job()]}), V0)
    assert got["usage"] == {"packed_tokens": len(prepared.plan.tokens), "forwards": 1}
    assert list(got["results"][0]) == ["id", "logprobs", "packed_tokens", "trees"]
    assert run_plan(prepared.plan).fingerprint == got["engine"]["fingerprint"]


@pytest.mark.parametrize(
    ("value", "code", "param"),
    [
        ([], "invalid_field", "body"),
        ({}, "invalid_field", "jobs"),
        ({"jobs": []}, "invalid_field", "jobs"),
        ({"jobs": [job(str(i)) for i in range(1001)]}, "invalid_field", "jobs"),
        ({"jobs": [1]}, "invalid_field", "jobs.0"),
        ({"jobs": [job() | {"x": 1}]}, "invalid_field", "jobs.0.x"),
        ({"jobs": [job(1)]}, "invalid_field", "jobs.0.id"),  # type: ignore[arg-type]
        ({"jobs": [job(), job()]}, "duplicate_id", "jobs.1.id"),
        ({"jobs": [{"id": "a", "options": [["x"]]}]}, "invalid_field", "jobs.0.prompts"),
        ({"jobs": [job("a", [], [])]}, "invalid_field", "jobs.0.prompts"),
        ({"jobs": [job("a", ["x", 1], [["x"], ["y"]])]}, "invalid_field", "jobs.0.prompts.1"),
        ({"jobs": [job("a", ["x"], [])]}, "invalid_field", "jobs.0.options"),
        ({"jobs": [job("a", ["x"]) | {"options": ["x"]}]}, "invalid_field", "jobs.0.options.0"),
        ({"jobs": [job("a", ["x"], [[]])]}, "too_many_options", "jobs.0.options.0"),
        ({"jobs": [job("a", ["x"], [["a", ""]])]}, "invalid_field", "jobs.0.options.0.1"),
        ({"jobs": [job("a", ["x"], [["a", "x" * 99]])]}, "option_too_long", "jobs.0.options.0.1"),
        ({"jobs": [job("a", ["x", "word " * 9999], [["a"], ["b"]])]}, "content_too_long", "jobs.0.prompts.1"),
        ({"jobs": [job()], "limits": {"max_options": 1}}, "too_many_options", "jobs.0.options.0"),
    ],
)
def test_refused(value: Any, code: str, param: str, tokenizer: ContentTokenizer) -> None:
    assert refusal(preprocessor(tokenizer, max_tokens=500), value, V0) == (code, param)


def test_faults_in_document_order(prep: Preprocessor) -> None:
    first = {"id": "a", "options": [["x" * 99]], "prompts": [1]}
    assert refusal(prep, {"jobs": [first]}, V0)[0] == "option_too_long"
    assert refusal(prep, {"jobs": [dict(reversed(first.items()))]}, V0)[0] == "invalid_field"


def test_max_tokens_is_exact(tokenizer: ContentTokenizer) -> None:
    value = {"jobs": [job("a", ["Is it?"], [[" yes no", " no"]])]}
    longest = 1 + len(tokenizer.encode("Is it?")) + len(tokenizer.encode(" yes no")) - 1
    assert refusal(preprocessor(tokenizer, max_tokens=longest), value, V0)[0] == ""
    assert refusal(preprocessor(tokenizer, max_tokens=longest - 1), value, V0)[0] == "content_too_long"
    assert refusal(preprocessor(tokenizer, limited(max_option_tokens=1)), value, V0)[0] == "option_too_long"
