"""Tokens and trust, over HTTP and as plain rules."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.plant import light
from tests.support.server import ServerProcess, body_of
from workers.frontend.auth import Auth, Caller

ACCESS = {"authorization": "Bearer access"}
TRUSTED = {"authorization": "Bearer trusted"}
NOBODY, PLAIN, FULL = Caller(False, False), Caller(True, False), Caller(True, True)


@pytest.mark.parametrize(
    ("token", "trusted", "header", "expected"),
    [
        (None, None, None, PLAIN),
        (None, None, b"Bearer none", PLAIN),
        (None, None, b"Basic x", PLAIN),
        ("a", None, None, NOBODY),
        ("a", None, b"Bearer a", FULL),
        ("a", None, b"bearer a", FULL),
        ("a", None, b"BEARER   a ", FULL),
        ("a", None, b"a", NOBODY),
        ("a", None, b"Basic a", NOBODY),
        ("a", None, b"Bearer", NOBODY),
        ("a", None, b"Bearer ", NOBODY),
        ("a", None, b"Bearer aa", NOBODY),
        ("a", None, b"Bearer \xe9", NOBODY),
        ("a", "t", b"Bearer a", PLAIN),
        ("a", "t", b"Bearer t", FULL),
        ("a", "t", b"Bearer x", NOBODY),
        (None, "t", b"Bearer t", FULL),
        (None, "t", b"Bearer none", NOBODY),
        (None, "t", None, NOBODY),
        ("t", "t", b"Bearer t", FULL),
    ],
)
def test_callers(token: str | None, trusted: str | None, header: bytes | None, expected: Caller) -> None:
    assert Auth(token, trusted).caller([] if header is None else [header]) == expected


def test_two_headers_are_as_good_as_none() -> None:
    assert Auth("a", None).caller([b"Bearer a", b"Bearer a"]) == NOBODY


CLOSED = ["/v1/score", "/v1/models", "/v1/packs", "/v1/packs/a", "/v0/info", "/v0/score", "/nope", "/", "//healthz"]


@pytest.mark.parametrize("path", CLOSED)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_everything_outside_the_open_list_is_401_first(closed_server: ServerProcess, path: str, method: str) -> None:
    for headers in ({}, {"authorization": "Bearer wrong"}):
        answer = closed_server.client.request(method, closed_server.url + path, headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["type"] == "authentication_error"
        assert answer.json()["error"]["code"] == "invalid_token"
        assert answer.json()["request_id"] == answer.headers["x-request-id"]
        assert "rejected" not in answer.json()


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/livez", "/health", "/ping", "/metrics"])
def test_open_routes_need_no_token(closed_server: ServerProcess, path: str) -> None:
    assert closed_server.get(path).status_code == 200
    assert closed_server.get(path, headers={"authorization": "Bearer wrong"}).status_code == 200


def test_with_a_token_wrong_paths_and_methods_show(closed_server: ServerProcess) -> None:
    assert closed_server.get("/nope", headers=ACCESS).status_code == 404
    assert closed_server.get("/v1/score", headers=ACCESS).status_code == 405
    assert closed_server.get("/v1/models", headers={"authorization": "bEaReR access"}).status_code == 200


def test_trust(closed_server: ServerProcess) -> None:
    plain = closed_server.post(body_of(), headers=ACCESS).json()
    trusted = closed_server.post(body_of(), headers=TRUSTED).json()
    assert "engine" not in plain
    assert "packed_tokens" not in plain["usage"]
    assert trusted["engine"].keys() == {"fingerprint", "passes", "packed_tokens", "shared_pass"}
    assert trusted["usage"]["packed_tokens"] > 0
    assert plain["results"] == trusted["results"]


def test_limits_of_the_body_count_for_trusted_callers_alone(closed_server: ServerProcess) -> None:
    body = body_of("hello world " * 10, limits={"max_content_tokens": 5})
    assert closed_server.post(body, headers=ACCESS).status_code == 200
    refused = closed_server.post(body, headers=TRUSTED)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "content_too_long")
    assert refused.json()["rejected"] == {
        key: value for key, value in refused.json()["error"].items() if key in ("code", "message", "param")
    }


def test_rejected_is_for_trusted_callers(closed_server: ServerProcess) -> None:
    assert "rejected" not in closed_server.post(b"{", headers=ACCESS).json()
    assert closed_server.post(b"{", headers=TRUSTED).json()["rejected"]["code"] == "invalid_json"
    large = closed_server.post(b" " * (2 << 20) + b"{}", headers=TRUSTED)
    assert large.status_code == 413
    assert large.json()["rejected"]["code"] == "body_too_large"
    assert "rejected" not in closed_server.get("/nope", headers=TRUSTED).json(), "only beside 400 and 413"


@pytest.mark.parametrize(("method", "path"), [("GET", "/v0/info"), ("POST", "/v0/drain"), ("POST", "/v0/score")])
def test_v0_is_for_trusted_callers(
    closed_server: ServerProcess, open_server: ServerProcess, method: str, path: str
) -> None:
    plain = closed_server.client.request(method, path, headers=ACCESS)
    assert plain.status_code == 401
    assert "trusted token" in plain.json()["error"]["message"]
    assert "valid token" in closed_server.client.request(method, path).json()["error"]["message"]
    for headers in ({}, TRUSTED):
        nobody = open_server.client.request(method, path, headers=headers)
        assert nobody.status_code == 401, "nobody is trusted on an open server"
        assert "a server without a token has none" in nobody.json()["error"]["message"]


def test_info(closed_server: ServerProcess) -> None:
    info = closed_server.get("/v0/info", headers=TRUSTED).json()
    assert info["version"] == "0.1.2"
    assert info["scheme"] == "f32"
    assert info["token_budget"] == 2048
    assert info["max_tokens"] == 4096
    assert info["revision"].startswith("sha256:")
    assert info["batch_invariant"] is True
    assert info["gpu"]["compute_capability"] is None
    assert info["versions"].keys() >= {"torch", "cuda", "transformers", "python"}
    assert info["boot"].keys() == {"load_s", "warmup_s", "compiles"}


def test_engine_primitive(closed_server: ServerProcess) -> None:
    prompts = ["hello world is", "hello world was"]
    job: dict[str, Any] = {"id": "j", "prompts": prompts, "options": [[" yes", " no"], [" yes"]]}
    answer = closed_server.post({"jobs": [job]}, "/v0/score", headers=TRUSTED)
    assert answer.status_code == 200
    (result,) = answer.json()["results"]
    assert result["id"] == "j"
    assert [len(row) for row in result["logprobs"]] == [2, 1]
    assert answer.json()["usage"].keys() == {"packed_tokens", "forwards"}


def test_draining(closed_server: ServerProcess) -> None:
    assert closed_server.client.post("/v0/drain", headers=TRUSTED).json() == {"draining": True}
    assert closed_server.get("/readyz").status_code == 503
    assert closed_server.get("/readyz").json() == {"ready": False, "draining": True}
    assert closed_server.get("/livez").status_code == 200
    assert closed_server.post(body_of(), headers=ACCESS).status_code == 200
    assert closed_server.client.post("/v0/drain", headers=TRUSTED).json() == {"draining": True}
    assert closed_server.client.delete("/v0/drain", headers=TRUSTED).json() == {"draining": False}
    assert closed_server.get("/readyz").status_code == 200


def test_tokens_never_reach_the_log(closed_server: ServerProcess) -> None:
    closed_server.post(body_of(), headers={"authorization": "Bearer very-secret-guess"})
    closed_server.get("/v1/models", headers=ACCESS)
    assert "very-secret-guess" not in closed_server.log
    assert '"access"' not in closed_server.log


def test_debug_and_closed_metrics(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """--debug gives internal fields to all; --metrics-auth closes /metrics; --trusted-token alone closes the server."""
    flags = ("--debug", "--metrics-auth", "--trusted-token", "t")
    with ServerProcess(tiny_checkpoint, tmp_path, *flags, env=light(tmp_path / "plant")) as server:
        assert server.post(body_of()).status_code == 401
        assert server.get("/metrics").status_code == 401
        assert server.get("/healthz").status_code == 200
        server.client.headers["authorization"] = "Bearer t"
        assert server.get("/metrics").status_code == 200
        assert "engine" in server.post(body_of()).json()
