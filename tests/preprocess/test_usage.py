"""Usage against counts by hand, timing, and the frame of a response."""

import json
import time
from dataclasses import replace
from typing import Any

import pytest

from tests.support.fake_engine import FINGERPRINT, run_plan
from tests.support.requests import REQUEST_ID, answer, body, header, item, preprocessor, query, to_bytes
from workers.preprocess.preprocessor import CHAT, Preprocessor
from workers.preprocess.tokenizer import ContentTokenizer

A = query("\nIs it?{?}", [" yes", " no yes"], id="a")
B = query("\n{x} or {y}?{?}", [" yes", " no"], id="b", combinations="all", values={"x": ["I", "you"], "y": ["me"]})
C = query("\nIs it?{?}", [" yes", " no yes"], id="c", empty_floor=False)


def test_counts_by_hand(prep: Preprocessor, tokenizer: ContentTokenizer) -> None:
    def n(text: str) -> int:
        return len(tokenizer.encode(text))

    contents = ["One two.", "One two.", ""]
    inputs = [
        item("0", contents[0]),
        item("1", contents[1], queries=[query("Own?{?}", [" no"], id="own")]),
        item("2", contents[2], query_ids=["a"]),
    ]
    got = answer(prep, {"inputs": inputs, "scoring": {"queries": [A, B, C]}})
    longer = n(" no yes") - 1
    a = n("\nIs it?") + longer
    b = n("\nI or me?") + n("\nyou or me?")
    own = n("Own?")
    query_tokens = 3 * a + 2 * b + own + 2 * a
    floor_tokens = a + b + own  # c has no floor, and a's floor is one over all inputs
    content = sum(map(n, contents))
    processed = content + query_tokens + floor_tokens
    assert got["usage"] == {
        "prompt_tokens": processed,
        "completion_tokens": 0,
        "total_tokens": processed,
        "prompt_tokens_details": {
            "content_tokens": content,
            "text_tokens": content,
            "query_tokens": query_tokens,
            "floor_tokens": floor_tokens,
        },
        "inputs": 3,
        "content": {
            "tokens": content,
            "text_tokens": content,
            "images": 0,
            "image_tokens": 0,
            "video_frames": 0,
            "video_tokens": 0,
            "audio_seconds": 0,
            "audio_tokens": 0,
        },
        "scoring": {
            "queries": 4,
            "combinations": 5,
            "options": 3,
            "prompts": 4 + 5 + 1,
            "floor_prompts": 4,
            "query_tokens": query_tokens,
            "floor_tokens": floor_tokens,
        },
        "processed_tokens": processed,
    }


def test_counts_are_logical(prep: Preprocessor, tokenizer: ContentTokenizer) -> None:
    """A tail that is read again with each question, and prefixes that questions share, count as the definitions say."""
    one = answer(prep, body(A, content="Someth"))["usage"]
    twice = answer(prep, body(A, A | {"id": "z"}, content="Someth"))["usage"]
    assert one["content"]["tokens"] == twice["content"]["tokens"] == len(tokenizer.encode("Someth"))
    assert twice["scoring"]["query_tokens"] == 2 * one["scoring"]["query_tokens"]
    assert twice["scoring"]["floor_tokens"] == one["scoring"]["floor_tokens"]


def test_a_floor_is_distinct_by_template_and_options(prep: Preprocessor) -> None:
    def floors(*queries: dict[str, Any]) -> int:
        count: int = answer(prep, body(*queries))["usage"]["scoring"]["floor_prompts"]
        return count

    assert floors(A, A | {"id": "z", "group": "g"}) == 1
    assert floors(A, A | {"id": "z", "options": [" yes"]}) == 2
    assert floors(A, A | {"id": "z", "template": "\nIs it so?{?}"}) == 2
    assert floors(A, C) == 1
    assert floors(C) == 0


def test_the_frame_of_a_response(prep: Preprocessor) -> None:
    before = int(time.time())
    got = answer(prep, body(endpoint="mine", model="DEMO"))
    names = [
        "id",
        "object",
        "created",
        "model",
        "endpoint",
        "system_fingerprint",
        "results",
        "warnings",
        "usage",
        "timing",
    ]
    assert list(got) == names
    assert (got["id"], got["object"], got["model"], got["endpoint"]) == (REQUEST_ID, "score", "DEMO", "mine")
    assert got["system_fingerprint"] == FINGERPRINT
    assert before <= got["created"] <= time.time()
    plain = answer(prep, body())
    assert "endpoint" not in plain
    assert plain["model"] == "gemma-3-270m"


def test_the_chat_route_adds_choices(prep: Preprocessor) -> None:
    chat, score = answer(prep, body(), header(CHAT)), answer(prep, body())
    assert chat.pop("choices") == []
    for response in (chat, score):
        del response["timing"], response["created"]
    assert chat == score


def test_timing_is_whole_milliseconds(prep: Preprocessor) -> None:
    head = replace(header(), received=time.monotonic() - 0.2)
    prepared = prep.prepare(to_bytes(body()), head)
    timing = json.loads(prep.assemble(prepared, run_plan(prepared.plan)))["timing"]
    assert list(timing) == ["wall_ms", "compile_ms", "queue_ms", "score_ms", "gpu_busy_ms"]
    assert all(type(value) is int for value in timing.values())
    assert (timing["queue_ms"], timing["score_ms"], timing["gpu_busy_ms"]) == (0, 13, 11)
    assert 200 <= timing["wall_ms"] < 5000


@pytest.mark.parametrize(("trusted", "debug"), [(False, False), (True, False), (False, True)])
def test_internal_fields(trusted: bool, debug: bool, tokenizer: ContentTokenizer) -> None:
    prep = preprocessor(tokenizer, debug=debug)
    prepared = prep.prepare(to_bytes(body()), header(trusted=trusted))
    got = json.loads(prep.assemble(prepared, run_plan(prepared.plan)))
    packed = len(prepared.plan.tokens)
    engine = {"fingerprint": FINGERPRINT, "passes": 1, "packed_tokens": packed, "shared_pass": False}
    shown = trusted or debug
    assert got.get("engine") == (engine if shown else None)
    assert got["usage"].get("packed_tokens") == (packed if shown else None)


def test_the_log_counts(prep: Preprocessor) -> None:
    prepared = prep.prepare(to_bytes(body(A, B)), header())
    usage = answer(prep, body(A, B))["usage"]
    assert prepared.log == {
        "inputs": 1,
        "queries": 2,
        "prompts": 3,
        "tokens": usage["processed_tokens"],
        "content_tokens": usage["content"]["tokens"],
        "query_tokens": usage["scoring"]["query_tokens"],
        "floor_tokens": usage["scoring"]["floor_tokens"],
    }
