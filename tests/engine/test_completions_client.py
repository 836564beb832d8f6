"""`benchmarks.completions_client` against a stand-in for a completions server."""

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from benchmarks.completions_client import is_found, run, top_tokens
from benchmarks.jobs import Json

JOBS: list[Json] = [
    {
        "id": name,
        "text": f"{name} is a town.",
        "cells": [
            {"cell": "c", "template": "{X}\n\nIs {F} near?", "phrase": phrase, "pair": ["yes", "never"]}
            for phrase in ("it", "the sea", "the hill")
        ],
    }
    for name in ("Alda", "Brin")
]


class StandIn(BaseHTTPRequestHandler):
    """Answers as vLLM does: ` yes` is among the top tokens; of ` never` the first token is, and for the sea alone."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    bodies: list[dict[str, Any]]
    status = 200

    def do_GET(self) -> None:
        self._send({"data": [{"id": "stand-in"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).bodies.append(body)
        top = {" yes": -0.5, " ": -3.0, " maybe": -1.5} | ({" ne": -2.0} if "the sea" in body["prompt"] else {})
        self._send({"choices": [{"text": " yes", "logprobs": {"top_logprobs": [top]}}], "usage": {"prompt_tokens": 7}})

    def _send(self, answer: dict[str, Any]) -> None:
        data = json.dumps(answer).encode()
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_args: Any) -> None:
        pass


@pytest.fixture
def stand_in() -> Iterator[tuple[str, type[StandIn]]]:
    handler = type("Handler", (StandIn,), {"bodies": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", handler
        server.shutdown()
        thread.join()


def test_every_question_is_one_request_and_options_are_counted(stand_in: tuple[str, type[StandIn]]) -> None:
    url, handler = stand_in
    answers, wall = asyncio.run(run(url, None, JOBS, 4, 20))
    assert wall > 0
    assert (answers.questions, answers.options, answers.tokens) == (6, 12, 42)
    assert (answers.found, answers.whole) == (6 + 2, 2)
    assert len({body["prompt"] for body in handler.bodies}) == 6
    assert all((b["max_tokens"], b["logprobs"], b["model"]) == (1, 20, "stand-in") for b in handler.bodies)


def test_an_articles_first_question_is_answered_before_the_others_go(stand_in: tuple[str, type[StandIn]]) -> None:
    url, handler = stand_in
    asyncio.run(run(url, "m", JOBS[:1], 4, 20))
    assert handler.bodies[0]["prompt"] == "Alda is a town.\n\nIs it near?"


def test_a_refusal_stops_the_script(stand_in: tuple[str, type[StandIn]]) -> None:
    url, handler = stand_in
    handler.status = 429
    with pytest.raises(SystemExit, match="answered 429"):
        asyncio.run(run(url, "m", JOBS[:1], 1, 20))


def test_both_spellings_of_top_tokens_are_read() -> None:
    listed = {"choices": [{"logprobs": {"top_logprobs": [[{"token": " a", "logprob": -1.0}]]}}]}
    assert top_tokens(listed) == {" a": -1.0}


def test_a_blank_token_begins_no_option() -> None:
    assert not is_found(" yes", {" ": -1.0, "": -2.0, " no": -3.0})
    assert is_found(" yes", {" y": -1.0})
