"""`Engine` and `spinf-serve score`: the server's objects in one process."""

import copy
import json
import multiprocessing
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from spinf_serve import Engine, snapshots
from spinf_serve.cli import app
from spinf_serve.protocol.errors import RequestError
from spinf_serve.refusal import StartRefused
from spinf_serve.settings import Settings
from workers.engine.engine import ScoringEngine

BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "I was charged twice, please refund one of the charges."}],
    "scoring": {
        "queries": [
            {"id": "refund", "template": "\n\nIs this about billing?\nAnswer:{?}", "options": [" yes", " no"]},
            {"id": "topic", "template": "\n\nTopic:{?}", "options": [" billing", " shipping", " yes or no"]},
        ]
    },
}
SMALL = {"device": "cpu", "warmup": "none", "token_budget": 256}


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Iterator[Engine]:
    with Engine(str(tiny_checkpoint), **SMALL) as engine:
        yield engine


def scores(response: dict[str, Any]) -> list[Any]:
    return response["results"]  # type: ignore[no-any-return]


def test_a_request_is_scored(engine: Engine) -> None:
    response = engine.score(BODY)
    assert response["object"] == "score"
    assert re.fullmatch(r"scr_[0-9A-HJKMNP-TV-Z]{26}", response["id"])
    assert re.fullmatch(r"fp_[0-9a-f]{10}", response["system_fingerprint"])
    assert response["system_fingerprint"] == engine.info.fingerprint
    assert [query["id"] for query in scores(response)[0]["queries"]] == ["refund", "topic"]
    for query in scores(response)[0]["queries"]:
        options = query["combinations"][0]["options"]
        assert sum(option["p"] for option in options) == pytest.approx(1, abs=1e-5)
        assert all(option["floor_p"] is not None for option in options)


def test_bytes_text_and_objects_are_the_same_request(engine: Engine) -> None:
    text = json.dumps(BODY)
    expected = scores(engine.score(BODY))
    assert scores(engine.score(text)) == scores(engine.score(text.encode())) == expected
    assert json.loads(engine.score_bytes(text.encode(), "scr_MINE"))["id"] == "scr_MINE"


def test_the_caller_is_trusted(engine: Engine) -> None:
    response = engine.score(BODY)
    assert response["engine"]["fingerprint"] == engine.info.fingerprint
    assert response["usage"]["packed_tokens"] > 0
    with pytest.raises(RequestError, match="too_many_options"):
        engine.score({**BODY, "limits": {"max_options": 1}})


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("", "invalid_json"),
        ("{", "invalid_json"),
        (b"\xff", "invalid_json"),
        (json.dumps(BODY).replace("charged", "\ud800"), "invalid_json"),
        ({"messages": [{"content": "\ud800"}]}, "invalid_json"),
        ({"temperature": float("nan")}, "invalid_json"),
        ({}, "invalid_field"),
        ([], "invalid_field"),
        ({**BODY, "model": "another"}, "model_not_served"),
        ({**BODY, "messages": [{"content": "yes " * 5000}]}, "content_too_long"),
        (b" " * (2 << 20) + b"{}", "body_too_large"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_refusals_have_the_codes_of_the_server(engine: Engine, body: Any, code: str) -> None:
    with pytest.raises(RequestError) as caught:
        engine.score(body)
    assert caught.value.code == code
    assert engine.score(BODY)


def test_the_path_given_is_a_name_of_the_model(engine: Engine, tiny_checkpoint: Path) -> None:
    assert engine.score({**BODY, "model": str(tiny_checkpoint)})["model"] == str(tiny_checkpoint)
    assert engine.score(BODY)["model"] == tiny_checkpoint.name == engine.model.id


def test_threads_get_their_own_answers_with_equal_bits(engine: Engine) -> None:
    """Many threads at once: every answer is what the request gets alone, and passes are shared."""
    bodies = []
    for number in range(12):
        body = copy.deepcopy(BODY)
        body["messages"][0]["content"] = f"message {number}: " + "please refund " * number
        bodies.append(body)
    alone = [scores(engine.score(body)) for body in bodies]
    assert len({json.dumps(answer) for answer in alone}) == len(bodies)
    found: dict[int, dict[str, Any]] = {}
    barrier = threading.Barrier(len(bodies))

    def call(number: int) -> None:
        barrier.wait()
        found[number] = engine.score(bodies[number])

    threads = [threading.Thread(target=call, args=(number,)) for number in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [scores(found[number]) for number in range(len(bodies))] == alone


def test_a_closed_engine_refuses(tiny_checkpoint: Path) -> None:
    engine = Engine(str(tiny_checkpoint), **SMALL)
    engine.close()
    engine.close()
    with pytest.raises(RequestError, match="the engine was closed"):
        engine.score(BODY)


def _in_a_child(engine: Engine, send: Callable[[Any], None]) -> None:
    try:
        engine.score(BODY)
    except RequestError as error:
        send(error.code)
    engine.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_is_told_that_it_has_no_engine(engine: Engine) -> None:
    """Instead of waiting for a thread that only its parent has; also where its parent is in the middle of a turn."""
    expected = scores(engine.score(BODY))
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_in_a_child, args=(engine, sender.send))
    engine._turns.others(child.start)
    assert receiver.poll(30), "the child hangs"
    assert receiver.recv() == "model_unavailable"
    child.join(30)
    assert child.exitcode == 0
    assert scores(engine.score(BODY)) == expected


def test_settings_are_those_of_the_server(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPINF_MAX_OPTIONS", "2")
    monkeypatch.setenv("SPINF_MODEL", str(tiny_checkpoint))
    with Engine(**SMALL) as engine, pytest.raises(RequestError, match="too_many_options"):
        engine.score(BODY)


def test_what_cannot_be_loaded_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(StartRefused, match="not supported yet"):
        Engine("qwen3.8-27b-s", device="cpu")
    with pytest.raises(StartRefused, match="--device"):
        Engine(str(tiny_checkpoint))
    with pytest.raises(StartRefused, match="token_budget: "):
        Engine(str(tiny_checkpoint), device="cpu", token_budget=0)
    with pytest.raises(TypeError, match="token_budgte"):
        Engine(str(tiny_checkpoint), device="cpu", token_budgte=5)


def test_missing_packages_are_named(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spinf_serve.extras.find_spec", lambda name: None if name == "torch" else name)
    with pytest.raises(StartRefused, match=r"torch not installed: pip install 'spinf-serve\[server\]'"):
        Engine(str(tiny_checkpoint), **SMALL)


@pytest.mark.parametrize(
    ("body", "code", "reads_tokenizer"),
    [
        (b"{", "invalid_json", False),
        (b'{"inputs": 3}', "invalid_field", False),
        (json.dumps({**BODY, "messages": [{"content": "x " * 9000}]}).encode(), "content_too_long", True),
    ],
    ids=["no JSON", "no request", "too long"],
)
def test_score_refuses_a_bad_request_before_it_loads(
    tiny_checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    body: bytes,
    code: str,
    reads_tokenizer: bool,
) -> None:
    """What its form shows costs not even the search for the weights."""
    monkeypatch.setattr(ScoringEngine, "load", lambda *_: pytest.fail("the weights were read"))
    if not reads_tokenizer:
        monkeypatch.setattr(snapshots, "resolve", lambda *_: pytest.fail("the weights were looked for"))
    (tmp_path / "request.json").write_bytes(body)
    result = CliRunner().invoke(app, ["score", str(tmp_path / "request.json"), str(tiny_checkpoint), "--device", "cpu"])
    assert result.exit_code == 1, result.output
    assert json.loads(result.stderr.splitlines()[-1])["error"]["code"] == code


def test_a_broken_tokenizer_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    for path in tiny_checkpoint.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(StartRefused, match="tokenizer cannot be loaded"):
        Engine(str(tmp_path), **SMALL)


def test_two_sets_of_weights_have_two_fingerprints(engine: Engine, tiny_checkpoint: Path, tmp_path: Path) -> None:
    copy_dir = tmp_path / tiny_checkpoint.name
    copy_dir.mkdir()
    for path in tiny_checkpoint.iterdir():
        (copy_dir / path.name).write_bytes(path.read_bytes())
    with Engine(str(copy_dir), **SMALL) as same:
        assert same.info.fingerprint == engine.info.fingerprint
    weights = bytearray((copy_dir / "model.safetensors").read_bytes())
    weights[-3] ^= 1
    (copy_dir / "model.safetensors").write_bytes(weights)
    with Engine(str(copy_dir), **SMALL) as other:
        assert other.info.fingerprint != engine.info.fingerprint


@pytest.fixture
def no_settings_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("SPINF_"):
            monkeypatch.delenv(name)


@pytest.mark.usefixtures("no_settings_around")
def test_score_prints_the_response_alone_on_standard_output(
    engine: Engine, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    request = tmp_path / "request.json"
    request.write_text(json.dumps(BODY))
    code = "from spinf_serve.cli import app; app()"
    command = [sys.executable, "-c", code, "score", str(request), str(tiny_checkpoint), "--device", "cpu"]
    done = subprocess.run([*command, "--token-budget", "99"], capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    response = json.loads(done.stdout)
    assert scores(response) == scores(engine.score(BODY)), "a fresh process and another budget give the same bits"
    assert response["engine"]["fingerprint"] == engine.info.fingerprint


@pytest.mark.usefixtures("no_settings_around")
def test_score_prints_a_refusal_on_standard_error(tiny_checkpoint: Path) -> None:
    body = json.dumps({**BODY, "limits": {"max_options": 1}})
    flags = ["--device", "cpu", "--warmup", "none"]
    done = CliRunner().invoke(app, ["score", *flags, "-", str(tiny_checkpoint)], input=body)
    assert (done.exit_code, done.stdout) == (1, "")
    envelope = json.loads(done.stderr.splitlines()[-1])
    assert envelope["error"]["code"] == envelope["rejected"]["code"] == "too_many_options"
    assert envelope["error"]["param"] == "scoring.queries.0.options"
    assert envelope["request_id"].startswith("scr_")


def test_settings_merged_before_serve_too(tiny_checkpoint: Path) -> None:
    settings = Settings.load({"model": str(tiny_checkpoint), **SMALL})
    with Engine.from_settings(settings) as engine:
        assert engine.info.token_budget == 256
