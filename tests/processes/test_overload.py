"""Far more clients than places: 200 and 429 only, nobody hangs, and health answers at once."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes.acts import hold_engine, in_background, wait_in_flight
from tests.support.server import ServerProcess, body_of

CLIENTS = 200
PROBES = 300

_CLIENTS = """
import asyncio, json, sys
import httpx

async def call(client, url, body):
    answer = await client.post(url + "/v1/score", content=body)
    return answer.status_code, answer.headers.get("retry-after"), answer.json().get("error", {}).get("code")

async def main(url, body, clients):
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(limits=limits, timeout=60, trust_env=False) as client:
        rounds = [await asyncio.gather(*(call(client, url, body) for _ in range(clients))) for _ in range(3)]
    print(json.dumps([answer for answers in rounds for answer in answers]))

asyncio.run(main(sys.argv[1], sys.stdin.read(), int(sys.argv[2])))
"""

_PROBES = """
import http.client, json, sys, time

connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=30)
times = []
for _ in range(int(sys.argv[2])):
    started = time.perf_counter()
    connection.request("GET", "/healthz")
    answer = connection.getresponse()
    assert answer.status == 200 and answer.read() == b'{"ok":true}'
    times.append(time.perf_counter() - started)
    time.sleep(0.005)
print(json.dumps(times))
"""


@pytest.fixture(scope="module")
def small_server(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tiny_checkpoint, tmp_path_factory.mktemp("small"), "--queue", "4") as running:
        yield running


def start(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_two_hundred_clients_against_five_places(small_server: ServerProcess) -> None:
    body = json.dumps(body_of("hello world " * 40))
    clients = start(_CLIENTS, small_server.url, str(CLIENTS))
    assert clients.stdin is not None
    clients.stdin.write(body)
    clients.stdin.close()
    clients.stdin = None
    probes = start(_PROBES, str(small_server.port), str(PROBES))
    answers = json.loads(clients.communicate(timeout=120)[0])
    times = sorted(json.loads(probes.communicate(timeout=120)[0]))
    seen = Counter(status for status, _, _ in answers)
    assert seen.keys() <= {200, 429}
    assert sum(seen.values()) == 3 * CLIENTS
    assert seen[200] >= 5
    assert seen[429] > 0
    refusals = [(after, code) for status, after, code in answers if status == 429]
    assert all(after.isdecimal() and int(after) >= 1 and code == "concurrency_limit" for after, code in refusals)
    assert times[int(0.99 * PROBES)] < 0.1, f"p99 of /healthz: {times[int(0.99 * PROBES)] * 1000:.0f} ms"
    assert small_server.post(body_of()).status_code == 200, "the server is open again"
    assert small_server.metric("spinf_requests_running") == 0
    assert small_server.metric("spinf_requests_waiting") == 0


def test_calls_of_different_callers_share_a_pass(small_server: ServerProcess) -> None:
    """And their numbers are the ones that each gets alone."""
    contents = [f"hello world {i}" for i in range(5)]
    alone = [small_server.post(body_of(content)).json()["results"] for content in contents]
    passes = small_server.metric("spinf_pass_tokens_count")
    go_on = hold_engine(small_server)
    try:
        calls = [in_background(lambda c=content: small_server.post(body_of(c))) for content in contents]  # type: ignore[misc]
        wait_in_flight(small_server, 5)
    finally:
        go_on()
    assert [call.result(60).json()["results"] for call in calls] == alone
    assert small_server.metric("spinf_pass_tokens_count") - passes < 5
