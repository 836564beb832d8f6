"""Whole responses against the definitions: every option of a plan is the whole-string tokenization's."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spinf_serve.plan import ScorePlan
from tests.support.fake_engine import paths_of, run_plan
from tests.support.oracle import assert_close, expected_results
from tests.support.requests import answer, body, header, item, limited, preprocessor, query, refusal, to_bytes
from workers.preprocess.preprocessor import Preprocessor
from workers.preprocess.tokenizer import ContentTokenizer

WORDS = [
    "yes",
    "Yes",
    "NO",
    "no",
    "billing",
    "refund",
    "the",
    "a",
    "I",
    "not",
    "ß",
    "ı",
    "I",
    "ﬁ",
    "9",
    "x",
    "ünder",
    "是",
]
TEXTS = st.lists(
    st.sampled_from(
        [*WORDS, " ", " ", "  ", "\n", "\n\n", ".", ":", "?", "-", "\t", "😀", "é", "▁", "<b>", "<bos>", "\0"]
    ),
    max_size=12,
).map("".join)
TEMPLATES = TEXTS.map(lambda text: text.replace("{", "").replace("}", ""))


@pytest.fixture(scope="module")
def roomy(tokenizer: ContentTokenizer) -> Preprocessor:
    """Long options allowed: the tiny vocabulary cuts words into many tokens."""
    return preprocessor(tokenizer, limited(max_option_tokens=100, max_query_tokens=4096))


@st.composite
def queries(draw: st.DrawFn, number: int) -> dict[str, Any]:
    template, fields = draw(TEMPLATES), {}
    if draw(st.booleans()):
        template += "{x}" + draw(TEMPLATES)
        fields["combinations"] = [{"x": v} for v in draw(st.lists(TEXTS, min_size=1, max_size=3))]
    options = draw(st.lists(TEXTS.filter(bool), min_size=1, max_size=5, unique_by=lambda o: o.strip().casefold()))
    return {
        "id": f"q{number}",
        "template": template + draw(st.sampled_from(["", ":", " is", "\n"])) + "{?}",
        "options": options,
        **fields,
        **draw(st.sampled_from([{}, {"empty_floor": False}, {"group": "g"}, {"group": "h"}])),
    }


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    inputs = [item(str(i), draw(TEXTS)) for i in range(draw(st.integers(1, 3)))]
    if draw(st.booleans()):
        inputs[0]["queries"] = [draw(queries(9))]
    scoring = {
        "queries": [draw(queries(i)) for i in range(draw(st.integers(1, 3)))],
        "case_insensitive": draw(st.booleans()),
    }
    return {"inputs": inputs, "scoring": scoring}


REFUSED = {"option_boundary", "duplicate_option"}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(data=st.data())
def test_responses_follow_the_definitions(
    data: st.DataObject, roomy: Preprocessor, tokenizer: ContentTokenizer
) -> None:
    value = data.draw(bodies())
    code, _ = refusal(roomy, value)
    if code:
        assert code in REFUSED
        return
    got = answer(roomy, value)
    if any(w["code"] == "join_not_merged" for w in got["warnings"]):
        return
    bos = [tokenizer.bos_id] if tokenizer.bos_id is not None else []
    assert_close(got["results"], expected_results(value, tokenizer.encode, bos))


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_the_boundary_rule_is_the_tokenizers(
    data: st.DataObject, roomy: Preprocessor, tokenizer: ContentTokenizer
) -> None:
    """option_boundary exactly where template + option tokenizes otherwise than template and option, content or not."""
    template, option, content = data.draw(TEMPLATES), data.draw(TEXTS.filter(bool)), data.draw(TEXTS)
    encode = tokenizer.encode
    merges = encode(template + option) != encode(template) + encode(option)
    for text in ("", content):
        code, param = refusal(roomy, body(query(template + "{?}", [option]), content=text))
        assert (code, param) == (("option_boundary", "scoring.queries.0.options.0") if merges else ("", None))


def check_plan(plan: ScorePlan) -> None:
    """What the engine may rely on; see `ScorePlan`."""
    total, jobs = len(plan.tokens), len(plan.prefix_lens)
    assert [a.dtype.name for a in (plan.tokens, plan.parents, plan.prefix_lens, plan.read_rows, plan.cols)] == [
        "int32"
    ] * 5
    assert [a.dtype.name for a in (plan.job_offsets, plan.col_offsets)] == ["int64"] * 2
    assert plan.job_offsets[0] == 0
    assert plan.job_offsets[-1] == total
    assert len(plan.job_offsets) == jobs + 1
    assert (np.diff(plan.read_rows) > 0).all()
    assert len(plan.col_offsets) == len(plan.read_rows) + 1
    assert plan.col_offsets[-1] == len(plan.cols)
    assert (np.diff(plan.col_offsets) > 0).all()
    for j in range(jobs):
        start, end, prefix = plan.job_offsets[j], plan.job_offsets[j + 1], plan.prefix_lens[j]
        assert 1 <= prefix <= end - start
        parents = plan.parents[start:end]
        assert parents[0] == -1
        assert (parents[1:prefix] == np.arange(start, start + prefix - 1)).all()
        assert (parents[prefix:] >= start + prefix - 1).all()
        # Depth-first: a token's parent is on the path of the token before it.
        for row in range(int(start + prefix), int(end)):
            ancestor = row - 1
            while ancestor != plan.parents[row]:
                ancestor = plan.parents[ancestor]
                assert ancestor >= 0
    paths = paths_of(plan)
    rows = plan.read_rows.tolist()
    spans = [plan.cols[plan.col_offsets[r] : plan.col_offsets[r + 1]].tolist() for r in range(len(rows))]
    assert all(len(set(span)) == len(span) for span in spans)
    leaves = set(range(total)) - set(plan.parents.tolist())
    assert leaves <= set(rows), "a token that nobody reads below"
    assert len(paths) == total


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_plans_keep_their_promises(data: st.DataObject, roomy: Preprocessor) -> None:
    value = data.draw(bodies())
    if refusal(roomy, value)[0] == "":
        check_plan(roomy.prepare(to_bytes(value), header()).plan)


def test_a_content_is_read_once_and_prompts_share_their_first_tokens(
    prep: Preprocessor, tokenizer: ContentTokenizer
) -> None:
    content = "I was charged twice for the month, please refund one of the charges."
    questions = [query(f"\n\nIs the customer asking for {x}?\nAnswer:{{?}}", id=x) for x in ("a", "b", "c")]
    plan = prep.prepare(
        to_bytes(body(*questions, content=content, scoring={"queries": questions, "empty_floor": False})), header()
    ).plan
    whole = [paths_of(plan)[row] for row in plan.read_rows.tolist()]
    encoded = [(tokenizer.bos_id, *tokenizer.encode(content + q["template"][:-3])) for q in questions]
    assert sorted(whole) == sorted(encoded)
    assert len(plan.tokens) == len({path[:n] for path in encoded for n in range(1, len(path) + 1)})


def test_groups_have_tries_of_their_own_and_the_same_numbers(prep: Preprocessor) -> None:
    a, b = query("\nIs it?{?}", id="a"), query("\nIs it so?{?}", id="b")
    together, apart = body(a, b), body(a, b | {"group": "g"})
    assert answer(prep, together)["results"] == answer(prep, apart)["results"]
    sizes = [len(prep.prepare(to_bytes(value), header()).plan.tokens) for value in (together, apart)]
    assert sizes[0] < sizes[1]
    alone = answer(prep, body(b))["results"][0]["queries"][0]
    assert answer(prep, apart)["results"][0]["queries"][1] == alone


def test_empty_content_reads_as_the_floor(prep: Preprocessor) -> None:
    for content in ("", []):
        row = answer(prep, body(content=content))["results"][0]["queries"][0]["combinations"][0]
        assert [o["p"] for o in row["options"]] == [o["floor_p"] for o in row["options"]]
        assert row["residual"] == row["floor_residual"]


def test_inputs_do_not_see_each_other(prep: Preprocessor) -> None:
    inputs = [item(str(i), text) for i, text in enumerate(["One.", "Two words", "", "One.", "三。"])]
    shared = [query(), query("\nWhich one: {x}?{?}", id="r", combinations=[{"x": "a"}, {"x": "b"}])]

    def results(chosen: list[dict[str, Any]]) -> dict[str, Any]:
        value = {"inputs": chosen, "scoring": {"queries": shared}}
        return {r["input_id"]: r["queries"] for r in answer(prep, value)["results"]}

    packed = results(inputs)
    assert list(packed) == [i["id"] for i in inputs]
    assert results(inputs[::-1]) == packed
    assert all(results([i])[i["id"]] == packed[i["id"]] for i in inputs)
    assert packed["0"] == packed["3"]


@pytest.mark.parametrize(
    ("content", "warned"),
    [
        ("a" * 300, True),  # a run of one letter that the vocabulary merges: nowhere clean
        ("a" * 300 + ".", False),
        ("ab", False),  # nothing clean inside, but the whole content is short enough to be read anew
        ("", False),
    ],
)
def test_join_not_merged(content: str, warned: bool, prep: Preprocessor, tokenizer: ContentTokenizer) -> None:
    if warned and tokenizer.clean_cut(content) is not None:
        content = "".join(c for c in content) + unclean_run(tokenizer)
    value = {"inputs": [item("one", content), item("two", "Plain.")], "scoring": {"queries": [query()]}}
    found = [(w["code"], w.get("input_id")) for w in answer(prep, value)["warnings"]]
    assert found == ([("join_not_merged", "one")] if warned else [])


def unclean_run(tokenizer: ContentTokenizer) -> str:
    """300 characters without a clean place."""
    for pair in ("\n", "  ", "e", "er", "in", "an", "on"):
        text = (pair * 300)[:300]
        if tokenizer.clean_cut(text) is None:
            return text
    raise AssertionError("the vocabulary has no such run")


def test_a_content_that_touches_an_option_is_told(prep: Preprocessor, tokenizer: ContentTokenizer) -> None:
    """A bare slot: the template allows every option, and the content's last letters would merge with one."""
    content, option = "Answer: y", "es"
    assert tokenizer.encode(content + option) != tokenizer.encode(content) + tokenizer.encode(option)
    got = answer(prep, body(query("{?}", [option, " no"]), content=content))
    assert [w["code"] for w in got["warnings"] if w["code"] == "join_not_merged"] == ["join_not_merged"]
    got = answer(prep, body(query("{?}", [" yes", " no"]), content="Answer:"))
    assert got["warnings"] == []
    whole = answer(prep, body(query(":{?}", [" yes", " no"]), content="Answer"))
    assert logprobs(got) == logprobs(whole)


def logprobs(response: dict[str, Any]) -> list[float]:
    return [
        option["logprob"]
        for result in response["results"]
        for question in result["queries"]
        for row in question["combinations"]
        for option in row["options"]
    ]


def test_numbers_from_the_engine_are_used_once_each(prep: Preprocessor) -> None:
    """Every column that is asked for changes the response."""
    value = body(query(options=[" yes", " no", " yes no"]), scoring={"queries": [query(options=[" yes", " no yes"])]})
    prepared = prep.prepare(to_bytes(value), header())
    result = run_plan(prepared.plan)
    before = json.loads(prep.assemble(prepared, result))["results"]
    for column in range(len(result.logprobs)):
        changed = result.logprobs.copy()
        changed[column] += 0.5
        after = json.loads(prep.assemble(prepared, type(result)(changed, "fp")))["results"]
        assert after != before
