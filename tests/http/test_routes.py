"""Paths, methods, ids, envelopes, health, metrics: everything around a scoring call."""

import json
import re

import pytest

from tests.http.raw import RawConnection
from tests.support.server import ServerProcess, body_of, wait_for

REQUEST_ID = re.compile(r"scr_[0-7][0-9A-HJKMNP-TV-Z]{25}")


def test_score(open_server: ServerProcess) -> None:
    answer = open_server.post(body_of())
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert REQUEST_ID.fullmatch(answer.headers["x-request-id"])
    assert answer.json()["id"] == answer.headers["x-request-id"]
    assert answer.json()["object"] == "score"
    assert "engine" not in answer.json(), "internal fields are for trusted callers"


def test_chat_completions(open_server: ServerProcess) -> None:
    answer = open_server.post(body_of(), "/v1/chat/completions")
    assert answer.status_code == 200
    assert answer.json()["choices"] == []
    refused = open_server.post({"messages": [{"role": "user", "content": "hi"}]}, "/v1/chat/completions")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "scoring_required")


def test_models(open_server: ServerProcess) -> None:
    answer = open_server.get("/v1/models").json()
    assert answer["object"] == "list"
    assert answer["data"] == answer["models"]
    (entry,) = answer["data"]
    assert entry["status"] == "available"
    assert entry["capabilities"] == ["score"]
    assert entry["features"] == {"media": [], "extraction": False, "generation": False}
    assert entry["limits"]["max_body_bytes"] == 65536
    assert entry["limits"]["queue"] == 4
    assert entry["batch_invariant"] is True
    assert open_server.post(body_of(model=entry["id"].upper())).json()["model"] == entry["id"].upper()


def test_packs_are_empty(open_server: ServerProcess) -> None:
    assert open_server.get("/v1/packs").json() == {"packs": [], "sources": []}
    for path in ("/v1/packs/spinf/moderation", "/v1/packs/a?version=1.0", "/v1/packs/a%2Fb"):
        missing = open_server.get(path)
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "unknown_pack")
        assert missing.json()["error"]["type"] == "not_found"


def test_health_routes(open_server: ServerProcess) -> None:
    assert open_server.get("/healthz").json() == {"ok": True}
    ready = open_server.get("/readyz").json()
    assert ready["ready"] is True
    assert ready["boot"].keys() == {"load_s", "warmup_s", "compiles"}
    assert open_server.get("/health").json() == ready
    assert open_server.get("/livez").json() == open_server.get("/ping").json() == {"live": True}


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "//v1/score",
        "//healthz",
        "/healthz/",
        "/HEALTHZ",
        "/v1//score",
        "/v1/score/",
        "/V1/score",
        "/v1/%73core",
        "/%68ealthz",
        "/v1/packs/",
        "/v1/../healthz",
        "/docs",
        "/redoc",
        "/openapi.json",
        "/metrics/",
    ],
)
def test_other_paths_are_not_found(open_server: ServerProcess, path: str) -> None:
    with RawConnection(open_server.port) as connection:  # a client library would tidy the path
        connection.send(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        answer = connection.read()
    assert answer.status == 404
    envelope = json.loads(answer.body)
    assert envelope["error"]["type"] == "not_found"
    assert envelope["error"]["code"] == "not_found"
    assert envelope["error"]["param"] is None
    assert envelope["request_id"] == answer.headers["x-request-id"]
    assert answer.headers.get("location") is None


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/score", "POST"),
        ("PUT", "/v1/score", "POST"),
        ("OPTIONS", "/v1/score", "POST"),
        ("POST", "/v1/models", "GET"),
        ("OPTIONS", "/healthz", "GET"),
        ("POST", "/healthz", "GET"),
        ("DELETE", "/v1/packs/a", "GET"),
        ("PATCH", "/metrics", "GET"),
    ],
)
def test_other_methods_are_not_allowed(open_server: ServerProcess, method: str, path: str, allowed: str) -> None:
    answer = open_server.client.request(method, path)
    assert answer.status_code == 405
    assert answer.json()["error"]["code"] == "method_not_allowed"
    assert answer.json()["error"]["type"] == "invalid_request"
    assert answer.headers["allow"] == allowed
    assert answer.json()["request_id"] == answer.headers["x-request-id"]


def test_head_is_not_allowed(open_server: ServerProcess) -> None:
    answer = open_server.client.head("/healthz")
    assert answer.status_code == 405
    assert answer.content == b""
    assert REQUEST_ID.fullmatch(answer.headers["x-request-id"])


def test_request_ids_are_never_the_callers(open_server: ServerProcess) -> None:
    answer = open_server.post(body_of(), headers={"x-request-id": "mine 42"})
    assert REQUEST_ID.fullmatch(answer.headers["x-request-id"])
    line = wait_for(lambda: next((x for x in open_server.lines if "mine 42" in x), None), "the call's line")
    assert f"request_id={answer.headers['x-request-id']}" in line
    assert 'caller_id="mine 42"' in line


@pytest.mark.parametrize("bad", ["x" * 129, "tab\there", "caf\xe9"])
def test_unfit_request_ids_are_not_logged(open_server: ServerProcess, bad: str) -> None:
    answer = open_server.post(body_of(), headers={"x-request-id": bad.encode("latin-1")})
    request_id = answer.headers["x-request-id"]
    line = wait_for(lambda: next((x for x in open_server.lines if request_id in x), None), "the call's line")
    assert "caller_id" not in line


def test_log_line_has_sizes_and_no_content(open_server: ServerProcess) -> None:
    answer = open_server.post(
        body_of("a rare platypus", queries=[{"id": "q9", "template": " X{?}", "options": [" yes"]}])
    )
    request_id = answer.json()["id"]
    line = wait_for(lambda: next((x for x in open_server.lines if request_id in x), None), "the call's line")
    for fact in (
        "route=score",
        "status=200",
        "inputs=1",
        "queries=1",
        "tokens=",
        "queue_ms=",
        "prepare_ms=",
        "gpu_ms=",
    ):
        assert fact in line
    assert "total_ms=" in line
    assert "platypus" not in open_server.log
    assert "route=healthz" not in open_server.log
    assert "route=metrics" not in open_server.log


def test_refused_call_is_logged_with_its_code(open_server: ServerProcess) -> None:
    answer = open_server.post(b"{")
    request_id = answer.json()["request_id"]
    line = wait_for(lambda: next((x for x in open_server.lines if request_id in x), None), "the call's line")
    assert "status=400" in line
    assert "code=invalid_json" in line


def test_json_logs(closed_server: ServerProcess) -> None:
    answer = closed_server.post(body_of(), headers={"authorization": "Bearer access", "x-request-id": 'a"b'})
    request_id = answer.json()["id"]
    line = wait_for(lambda: next((x for x in closed_server.lines if request_id in x), None), "the call's line")
    entry = json.loads(line)
    assert entry["message"] == "call"
    assert entry["request_id"] == request_id
    assert entry["caller_id"] == 'a"b'
    assert entry["status"] == 200
    assert entry["process"] == "frontend"
    assert all(json.loads(line) for line in closed_server.lines), "every line is JSON"


METRICS = {
    "spinf_requests_total",
    "spinf_requests_rejected_total",
    "spinf_requests_running",
    "spinf_requests_waiting",
    "spinf_request_seconds_count",
    "spinf_queue_seconds_count",
    "spinf_prepare_seconds_count",
    "spinf_pass_tokens_count",
    "spinf_pass_occupancy_count",
    "spinf_gpu_seconds_total",
    "spinf_tokens_total",
    "spinf_gpu_memory_bytes",
    "spinf_gpu_memory_part_bytes",
    "spinf_late_compiles_total",
    "spinf_engine_restarts_total",
    "spinf_workers_lost_total",
    "spinf_results_dropped_total",
    "spinf_info",
    "process_cpu_seconds_total",
    "process_resident_memory_bytes",
}


def test_metrics(open_server: ServerProcess) -> None:
    answer = open_server.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    names = {re.split(r"[ {]", line)[0] for line in answer.text.splitlines() if not line.startswith("#")}
    assert names >= METRICS
    assert 'spinf_requests_rejected_total{code="unsupported_option"} 0.0' in answer.text, "registered with 0"


def test_metrics_count_calls_and_tokens(open_server: ServerProcess) -> None:
    def counts() -> list[float]:
        return [
            open_server.metric("spinf_requests_total", route="score", status="200"),
            open_server.metric("spinf_request_seconds_count"),
            open_server.metric("spinf_queue_seconds_count"),
            open_server.metric("spinf_prepare_seconds_count", kind="text"),
        ]

    before, tokens = counts(), open_server.metric("spinf_tokens_total", kind="content")
    answer = open_server.post(body_of())
    assert counts() == [count + 1 for count in before]
    assert (
        open_server.metric("spinf_tokens_total", kind="content") == tokens + answer.json()["usage"]["content"]["tokens"]
    )
    refused = open_server.metric("spinf_requests_rejected_total", code="not_found")
    open_server.get("/some/where")
    assert open_server.metric("spinf_requests_rejected_total", code="not_found") == refused + 1
    fingerprint = answer.json()["system_fingerprint"]
    assert open_server.metric("spinf_info", fingerprint=fingerprint, scheme="f32") == 1
    assert open_server.metric("spinf_gpu_seconds_total") > 0


def test_metric_labels_are_bounded(open_server: ServerProcess) -> None:
    for number in range(20):
        open_server.get(f"/unknown/{number}")
        open_server.client.request(f"ODD{number}", "/v1/score")
    routes = set(re.findall(r'spinf_requests_total\{route="([^"]*)"', open_server.get("/metrics").text))
    assert routes <= {
        *("score", "chat", "models", "packs", "pack", "v0_score", "info", "drain", "other"),
        *("healthz", "readyz", "livez", "health", "ping", "metrics"),
    }
