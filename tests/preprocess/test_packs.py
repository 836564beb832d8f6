"""Packs in a request, from bytes to the response, over an engine that is a function of the path."""

import copy
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spinf_serve.packs.pack import from_data
from tests.support.packs import FILES, guarded, pack_file, plain_pack, tiny_pack, use
from tests.support.requests import answer, header, item, limited, preprocessor, query, refusal, to_bytes
from workers.preprocess.preprocessor import Preprocessor
from workers.preprocess.tokenizer import ContentTokenizer

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


@pytest.fixture(scope="module")
def shelf(tokenizer: ContentTokenizer) -> Preprocessor:
    return preprocessor(tokenizer, pack_files=FILES)


def test_a_pack_answers_with_its_entry_alone(shelf: Preprocessor) -> None:
    response = answer(shelf, guarded("one", "two"))
    for result in response["results"]:
        assert result.keys() == {"input_id", "queries", "packs"}
        assert result["queries"] == []
        (entry,) = result["packs"]
        assert list(entry) == ["id", "version", "context", "categories", "decision"]
        assert (entry["id"], entry["version"], entry["context"]) == ("acme/guard", "1.0", "chat")
        assert list(entry["categories"]) == ["harm", "money"]
    assert response["warnings"] == []


def test_the_entry_is_what_the_library_says_of_the_raw_results(shelf: Preprocessor) -> None:
    """For both kinds of answers, every mode, and overrides."""
    for kind in ("p", "logprob"):
        data = tiny_pack(answers=kind)
        prep = preprocessor(shelf._encoder._tokenizer, pack_files=(pack_file(data),))
        for decision in (
            {},
            {"mode": "max", "threshold": 0.3},
            {"mode": "per_category", "thresholds": {"harm": None, "money": 0.1}, "critical": []},
            {"threshold": -3, "critical": ["harm"]},
        ):
            body = guarded("one", "two", "three", packs=[use(include_queries=True, decision=decision)])
            for result in answer(prep, body)["results"]:
                assert [q["id"] for q in result["queries"]] == ["p-ok", "p-about", "p-tone"]
                assert result["packs"] == [from_data(data, "test").evaluate(result, **decision)]


def test_the_request_side_of_the_library_scores_the_same(shelf: Preprocessor) -> None:
    pack = from_data(tiny_pack(), "test")
    texts = ["one", "A longer text about money.", ""]
    body = pack.request(texts, params={"who": "Ann"}, model="demo")
    plain = [pack.evaluate(result) for result in answer(shelf, body)["results"]]
    assert plain == [result["packs"][0] for result in answer(shelf, guarded(*texts))["results"]]


def test_the_context_stands_around_the_content_and_the_callers_questions_read_it(shelf: Preprocessor) -> None:
    asked = query(id="mine", group="g")
    wrapped = {"inputs": [item("0", "Message from Ann (here):\nhello\n")], "scoring": {"queries": [asked]}}
    wrapped["scoring"] |= {"case_insensitive": False}
    with_pack = answer(shelf, guarded("hello", queries=[asked]))["results"][0]
    assert with_pack["queries"] == answer(shelf, wrapped)["results"][0]["queries"]


def test_contexts_and_parameters_choose_the_text(shelf: Preprocessor) -> None:
    def entry(body: dict[str, Any]) -> Any:
        return answer(shelf, body)["results"][0]["packs"][0]

    chat, post = entry(guarded("hello")), entry(guarded("hello", packs=[use(context="post")]))
    assert (chat["context"], post["context"]) == ("chat", "post")
    assert chat["categories"] != post["categories"]
    given = guarded("hello")
    given["inputs"][0]["parameters"] = {"who": "Bob", "place": "here"}
    assert entry(given)["categories"] != chat["categories"]
    given["inputs"][0]["parameters"] = {"who": "Ann", "place": "here"}
    assert entry(given) == chat


def test_results_are_equal_bits_with_and_without_company(shelf: Preprocessor) -> None:
    texts = [f"Content number {i} about billing." for i in range(64)]
    mine = [query(id="a"), query(id="b", template="\nAnother? Answer:{?}", group="g")]
    alone = [answer(shelf, guarded(text))["results"][0]["packs"] for text in texts]
    together = answer(shelf, guarded(*texts))["results"]
    joined = answer(shelf, guarded(*texts, queries=mine))["results"]
    assert [result["packs"] for result in together] == alone
    assert [result["packs"] for result in joined] == alone
    without = guarded(*(f"Message from Ann (here):\n{text}\n" for text in texts), queries=mine, packs=[])
    for entry in without["inputs"]:
        del entry["parameters"]
    without["scoring"]["case_insensitive"] = False
    assert [r["queries"] for r in answer(shelf, without)["results"]] == [r["queries"] for r in joined]


def test_a_group_is_a_trie_of_its_own(shelf: Preprocessor) -> None:
    """A caller's question that is the pack's word by word shares no token with it."""

    def branch_tokens(body: dict[str, Any]) -> int:
        body["scoring"] |= {"empty_floor": False, "case_insensitive": False}
        plan = shelf.prepare(to_bytes(body), header()).plan
        return len(plan.tokens) - int(plan.prefix_lens.sum())

    same = query(id="mine", template="\nIs it fine? Answer:{?}", options=[" yes", " no"])
    alone = {"messages": [{"content": "Message from Ann (here):\nx\n"}], "scoring": {"queries": [same]}}
    pack, both = branch_tokens(guarded("x")), branch_tokens(guarded("x", queries=[same]))
    assert both == pack + branch_tokens(alone)


def test_two_packs_of_one_call_keep_their_order(shelf: Preprocessor) -> None:
    packs = [use("acme/plain"), use(context="post")]
    result = answer(shelf, guarded("hello", packs=packs))["results"][0]
    assert [entry["id"] for entry in result["packs"]] == ["acme/plain", "acme/guard"]
    alone = answer(shelf, guarded("hello", packs=packs[1:]))["results"][0]
    assert result["packs"][1] == alone["packs"][0]


def test_each_pack_shows_its_queries_or_not(shelf: Preprocessor) -> None:
    packs = [use("acme/plain", include_queries=True), use(context="post")]
    body = guarded("hello", packs=packs, queries=[query(id="mine")])
    result = answer(shelf, body)["results"][0]
    assert [q["id"] for q in result["queries"]] == ["mine", "x-ok"]
    body["scoring"]["packs"] = [use("acme/plain"), use(context="post", include_queries=True)]
    result = answer(shelf, body)["results"][0]
    assert [q["id"] for q in result["queries"]] == ["mine", "p-ok", "p-about", "p-tone"]


def test_warnings_of_hidden_queries_are_hidden(shelf: Preprocessor) -> None:
    def codes(body: dict[str, Any]) -> list[tuple[str, str]]:
        return [(w["code"], w.get("query_id", "")) for w in answer(shelf, body)["warnings"]]

    hidden = guarded("hello", queries=[query(id="mine")])
    shown = guarded("hello", queries=[query(id="mine")], packs=[use(include_queries=True)])
    assert codes(hidden) == [("low_option_mass", "mine")]
    assert ("low_option_mass", "p-ok") in codes(shown)


def test_an_inputs_query_ids_keep_the_packs_queries(shelf: Preprocessor) -> None:
    body = guarded("one", "two", queries=[query(id="a"), query(id="b")])
    body["inputs"][0]["query_ids"] = ["b"]
    body["inputs"][1]["query_ids"] = []
    first, second = answer(shelf, body)["results"]
    assert [q["id"] for q in first["queries"]] == ["b"]
    assert second["queries"] == []
    assert first["packs"] != []
    assert second["packs"] != []


def test_the_packs_case_rule_holds_for_the_whole_call(shelf: Preprocessor) -> None:
    def options(body: dict[str, Any]) -> Any:
        return answer(shelf, body)["results"][0]["queries"][0]["combinations"][0]["options"]

    exact = guarded("hello", queries=[query(id="mine")])
    loud = guarded("hello", queries=[query(id="mine")], packs=[use("acme/loud")])
    del loud["inputs"][0]["parameters"]
    plain = copy.deepcopy(loud)
    plain["scoring"]["packs"] = [use("acme/plain")]
    assert options(loud) != options(plain)
    exact["scoring"]["case_insensitive"] = False
    assert refusal(shelf, exact) == ("", None)
    loud["scoring"]["case_insensitive"] = True
    assert refusal(shelf, loud) == ("", None)


def test_floors_follow_the_packs_setting(tokenizer: ContentTokenizer) -> None:
    data = plain_pack(scoring=plain_pack()["scoring"] | {"empty_floor": False})
    prep = preprocessor(tokenizer, pack_files=(pack_file(data),))
    body = guarded("hello", packs=[use("acme/plain", include_queries=True)], queries=[query(id="mine")])
    del body["inputs"][0]["parameters"]
    mine, pack = answer(prep, body)["results"][0]["queries"]
    assert mine["combinations"][0]["floor_residual"] is not None
    assert pack["combinations"][0]["floor_residual"] is None
    body["scoring"]["empty_floor"] = False
    prep = preprocessor(tokenizer, pack_files=(pack_file(plain_pack()),))
    mine, pack = answer(prep, body)["results"][0]["queries"]
    assert mine["combinations"][0]["floor_residual"] is None
    assert pack["combinations"][0]["floor_residual"] is not None


def test_usage_counts_the_packs(shelf: Preprocessor) -> None:
    alone = answer(shelf, guarded("one", "two"))["usage"]
    assert alone["packs"] == {"count": 1, "query_tokens": alone["scoring"]["query_tokens"]}
    assert (alone["scoring"]["queries"], alone["scoring"]["combinations"], alone["scoring"]["prompts"]) == (3, 4, 8)
    both = answer(shelf, guarded("one", "two", queries=[query(id="mine")]))["usage"]
    assert both["packs"] == alone["packs"]
    assert both["scoring"]["query_tokens"] > alone["scoring"]["query_tokens"]
    assert "packs" not in answer(shelf, guarded(queries=[query()], packs=[]) | {"inputs": [item("0")]})["usage"]


def test_long_templates_of_packs_are_exempt(tokenizer: ContentTokenizer) -> None:
    scoring = copy.deepcopy(plain_pack()["scoring"])
    scoring["queries"][0]["template"] = "\n" + "Is it fine? " * 300 + "Answer:{?}"
    prep = preprocessor(tokenizer, pack_files=(pack_file(plain_pack(scoring=scoring)),))
    body = {"messages": [{"content": "x"}], "scoring": {"packs": [use("acme/plain")]}}
    assert refusal(prep, body) == ("", None)
    body["scoring"] = {"queries": [query(template=scoring["queries"][0]["template"])]}
    assert refusal(prep, body)[0] == "template_too_long"


def test_messages_work_where_no_parameter_is_required(shelf: Preprocessor) -> None:
    body = {"messages": [{"content": "hello"}], "scoring": {"packs": [use("acme/plain")]}}
    assert answer(shelf, body)["results"][0]["packs"][0]["id"] == "acme/plain"


def test_the_default_and_older_versions(shelf: Preprocessor) -> None:
    def version(**fields: Any) -> Any:
        return answer(shelf, guarded("x", packs=[use(**fields)]))["results"][0]["packs"][0]["version"]

    assert version() == "1.0"
    assert version(version="0.9") == "0.9"


def with_input(**fields: Any) -> dict[str, Any]:
    body = guarded("hello")
    body["inputs"][0] |= fields
    return body


def with_scoring(**fields: Any) -> dict[str, Any]:
    body = guarded("hello")
    body["scoring"] |= fields
    return body


def decided(pack_id: str = "acme/guard", **decision: Any) -> dict[str, Any]:
    return guarded("hello", packs=[use(pack_id, decision=decision)])


P = "scoring.packs.0"
REFUSALS: list[tuple[dict[str, Any], str, str | None]] = [
    (guarded(packs=[use("acme/none")]), "unknown_pack", f"{P}.id"),
    (guarded(packs=[use("acme/soon")]), "pack_not_available", f"{P}.id"),
    (guarded(packs=[use(version="2.0")]), "pack_not_available", f"{P}.version"),
    (guarded(packs=[use(version="7")]), "unknown_pack_version", f"{P}.version"),
    (guarded(packs=[use(version=1)]), "invalid_field", f"{P}.version"),
    (guarded(packs=[use(), use(version="0.9")]), "duplicate_id", "scoring.packs.1.id"),
    (guarded(packs=[use(context="mail")]), "invalid_field", f"{P}.context"),
    (guarded(packs=[use(mode="max")]), "invalid_field", f"{P}.mode"),
    (guarded(packs=[use(include_queries=1)]), "invalid_field", f"{P}.include_queries"),
    (guarded(packs=[3]), "invalid_field", P),
    (guarded(packs={}), "invalid_field", "scoring.packs"),
    (decided(top=1), "invalid_field", f"{P}.decision.top"),
    (decided(mode="vote"), "invalid_field", f"{P}.decision.mode"),
    (decided(mode="per_category", threshold=0.5), "invalid_field", f"{P}.decision.threshold"),
    (decided(mode="max", threshold=1.5), "invalid_field", f"{P}.decision.threshold"),
    (decided(threshold="0.5"), "invalid_field", f"{P}.decision.threshold"),
    (decided(thresholds={"harm": 2}), "invalid_field", f"{P}.decision.thresholds.harm"),
    (decided(thresholds={"none": 0.5}), "unknown_category", f"{P}.decision.thresholds.none"),
    (decided(thresholds=[]), "invalid_field", f"{P}.decision.thresholds"),
    (decided(critical=["harm", "none"]), "unknown_category", f"{P}.decision.critical.1"),
    (decided(critical=[1]), "invalid_field", f"{P}.decision.critical.0"),
    (with_input(parameters={}), "invalid_field", "inputs.0.parameters.who"),
    (with_input(parameters={"who": "x", "whom": "y"}), "invalid_field", "inputs.0.parameters.whom"),
    (with_input(parameters={"who": 3}), "invalid_field", "inputs.0.parameters.who"),
    (with_input(parameters=[]), "invalid_field", "inputs.0.parameters"),
    (
        {"messages": [{"content": "x"}], "scoring": {"packs": [use()]}},
        "invalid_field",
        "messages",
    ),
    (with_scoring(packs=[use(), use("acme/plain")]), "pack_conflict", "scoring.packs.1.context"),
    (with_scoring(packs=[use(context="post"), use("acme/loud")]), "pack_conflict", "scoring.packs.1.context"),
    (
        with_scoring(
            packs=[use("acme/plain", include_queries=True), use("acme/media", include_queries=True)],
        )
        | {"inputs": [item("0")]},
        "duplicate_id",
        "scoring.packs.1.include_queries",
    ),
    (with_scoring(case_insensitive=True), "pack_conflict", "scoring.case_insensitive"),
    (with_scoring(queries=[query(id="p-tone")]), "duplicate_id", "scoring.queries.0.id"),
    (with_input(queries=[query(id="p-tone")]), "duplicate_id", "inputs.0.queries.0.id"),
    (with_scoring(queries=[query(group="acme/guard@1.0")]), "reserved_group", "scoring.queries.0.group"),
    (with_input(queries=[query(group="acme/guard@1.0")]), "reserved_group", "inputs.0.queries.0.group"),
    (with_input(query_ids=["p-tone"]), "unknown_query_id", "inputs.0.query_ids.0"),
    (
        with_input(messages=[{"content": [{"type": "text", "text": "a"}, IMAGE]}]),
        "pack_media_not_supported",
        "inputs.0.messages.0.content.1",
    ),
    (
        {"messages": [{"content": [IMAGE]}], "scoring": {"packs": [use("acme/media")]}},
        "media_not_supported",
        "messages.0.content.0",
    ),
]


@pytest.mark.parametrize(("body", "code", "param"), REFUSALS, ids=[f"{r[1]}-{r[2]}" for r in REFUSALS])
def test_refusals(shelf: Preprocessor, body: dict[str, Any], code: str, param: str | None) -> None:
    assert refusal(shelf, body) == (code, param)


def test_a_missing_parameter_is_missed_at_its_input(shelf: Preprocessor) -> None:
    body = guarded("hello", "world")
    del body["inputs"][1]["parameters"]
    assert refusal(shelf, body) == ("invalid_field", "inputs.1.parameters.who")


def test_a_group_of_another_version_is_the_callers(shelf: Preprocessor) -> None:
    assert refusal(shelf, with_scoring(queries=[query(group="acme/guard@0.9")])) == ("", None)


def test_the_first_fault_in_document_order_is_reported(shelf: Preprocessor) -> None:
    late = {"scoring": {"packs": [use("acme/none")]}, "inputs": [item("0", parameters={"x": "y"})]}
    early = dict(reversed(late.items()))
    assert refusal(shelf, late) == ("unknown_pack", f"{P}.id")
    # Whether the parameter is unknown cannot be said before the pack is known.
    assert refusal(shelf, early) == ("unknown_pack", f"{P}.id")


def test_the_limits_count_the_packs_prompts(tokenizer: ContentTokenizer) -> None:
    for most, code in ((3, "too_many_prompts"), (4, "")):
        prep = preprocessor(tokenizer, limited(max_prompts_per_input=most), pack_files=FILES)
        assert refusal(prep, guarded("x"))[0] == code


def test_a_broken_lock_says_so_in_the_decision(tokenizer: ContentTokenizer) -> None:
    data = tiny_pack()
    data["categories"]["harm"]["platt"] = [1.0, 0.2]
    prep = preprocessor(tokenizer, pack_files=(pack_file(data),))
    decision = answer(prep, guarded("x"))["results"][0]["packs"][0]["decision"]
    assert decision["mode"] == "per_category"
    assert "lock" in decision["warning"]


_WORDS = st.sampled_from(
    [
        "acme/guard",
        "acme/plain",
        "acme/soon",
        "1.0",
        "2.0",
        "chat",
        "post",
        "max",
        "micro_layer",
        "harm",
        "who",
        "X",
        "",
    ]
)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.floats(-2, 2) | _WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_WORDS, inner, max_size=3),
    max_leaves=6,
)
_DECISIONS = st.dictionaries(st.sampled_from(["mode", "threshold", "thresholds", "critical", "top"]), _VALUES)
_ENTRIES = st.fixed_dictionaries(
    {"id": _WORDS | _VALUES},
    optional={
        "version": _WORDS | _VALUES,
        "context": _WORDS | _VALUES,
        "decision": _DECISIONS | _VALUES,
        "include_queries": st.booleans() | _VALUES,
        "other": _VALUES,
    },
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(packs=st.lists(_ENTRIES | _VALUES, max_size=3) | _VALUES, parameters=st.dictionaries(_WORDS, _VALUES) | _VALUES)
def test_whatever_is_sent_is_answered_or_refused(shelf: Preprocessor, packs: Any, parameters: Any) -> None:
    body = guarded("hello", packs=packs, queries=[query(id="mine")])
    body["inputs"][0]["parameters"] = parameters
    code, _param = refusal(shelf, body)
    if not code:
        assert len(answer(shelf, body)["results"]) == 1
