"""The request side of a pack: contexts, parameters, and bodies for a server that knows nothing of packs."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spinf_client import packs as client

from spinf_serve.packs.pack import Pack, from_data
from tests.base.packs.support import draft_of, small_pack


def pack(**changes: Any) -> Pack:
    return from_data(small_pack(**changes), "test")


def text(*parts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": part} for part in parts]


def test_a_context_stands_around_the_content() -> None:
    assert pack().wrap("hello", params={"who": "Ann"}) == text("A message from Ann (here):\n", "hello", "\n")
    assert pack().wrap("hello", "post", {"who": "Ann"}) == text("A post:\n", "hello")


@given(st.text(), st.text(), st.text())
def test_values_and_content_are_inserted_as_they_are(content: str, who: str, place: str) -> None:
    parts = pack().wrap(content, params={"who": who, "place": place})
    assert parts == text(f"A message from {who} ({place}):\n", *filter(None, [content]), "\n")
    assert parts == client.wrap(small_pack(), content, None, {"who": who, "place": place})


def test_an_empty_content_is_still_a_content() -> None:
    bare = pack(contexts={"bare": "{X}"})
    assert bare.wrap("", params={"who": ""}) == text("")


def test_media_parts_are_wrapped_whole() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    parts = pack().wrap([image, {"type": "text", "text": "look"}], "post", {"who": "Ann"})
    assert parts == [*text("A post:\n"), image, *text("look")]


@pytest.mark.parametrize(
    ("context", "params", "message"),
    [
        ("mail", {"who": "x"}, "has no context 'mail'; contexts: chat, post"),
        (None, {}, "parameter who: the pack requires this parameter"),
        (None, {"who": "x", "whom": "y"}, "parameter whom: the pack has no such parameter"),
        (None, {"who": 3}, "parameter who: must be a string"),
    ],
)
def test_contexts_and_parameters_that_cannot_be_used(context: str | None, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack().wrap("x", context, params)


def test_a_required_parameter_with_a_default_may_be_left_out() -> None:
    changed = pack(
        parameters={"who": {"label": "Who", "default": "someone"}, "place": {"label": "P", "required": False}}
    )
    assert changed.wrap("x")[0]["text"] == "A message from someone ():\n"


def test_a_request_asks_the_packs_questions_as_ordinary_queries() -> None:
    body = pack().request(["one", "two"], ids=["a", "b"], params=[{"who": "Ann"}, {"who": "Bob"}], model="m")
    assert body["model"] == "m"
    assert [entry["id"] for entry in body["inputs"]] == ["a", "b"]
    assert body["inputs"][1]["messages"][0]["content"][0]["text"] == "A message from Bob (here):\n"
    assert body["scoring"] == client.request_scoring(small_pack())
    assert {query["group"] for query in body["scoring"]["queries"]} == {"acme/guard@1.2.0"}
    assert [query["empty_floor"] for query in body["scoring"]["queries"]] == [True, False, True]


def test_one_text_and_the_packs_own_model_are_the_defaults() -> None:
    body = pack().request("one", "post", params={"who": "Ann"})
    assert (body["model"], [entry["id"] for entry in body["inputs"]]) == ("demo", ["0"])


def test_a_draft_has_a_request_side() -> None:
    draft = from_data(draft_of(small_pack()), "test", draft=True)
    assert draft.request("one", params={"who": "Ann"}) == pack().request("one", params={"who": "Ann"})


def test_ids_and_parameters_must_match_the_texts() -> None:
    with pytest.raises(ValueError, match="2 texts, but 1 ids"):
        pack().request(["a", "b"], ids=["x"], params={"who": "Ann"})
