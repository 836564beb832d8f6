"""Stopping: what is in flight finishes, new calls are refused politely, nothing stays behind."""

import os
import re
import signal
import socket
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from tests.processes.acts import hold_engine, in_background, wait_in_flight
from tests.support.plant import light
from tests.support.server import ServerProcess, body_of, slow_body, stat_of, wait_for


def wait_stopping(server: ServerProcess) -> None:
    wait_for(lambda: server.get("/readyz").status_code == 503, "not ready any more")


def test_signal_under_load_loses_no_accepted_request(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """SIGTERM with a full server and clients knocking: every call that was taken gets its scores, exit code 0."""
    with ServerProcess(tiny_checkpoint, tmp_path, "--queue", "7", env=light(tmp_path / "plant")) as server:
        children = server.children()
        go_on = hold_engine(server)
        calls = [in_background(lambda: server.post(body_of())) for _ in range(8)]
        wait_in_flight(server, 8)
        server.signal(signal.SIGTERM)
        wait_stopping(server)
        assert server.get("/readyz").json() == {"ready": False, "draining": True}
        assert server.get("/healthz").status_code == 200
        assert server.get("/livez").status_code == 200
        for _ in range(2):  # over new connections: the port stays open
            refused = httpx.post(server.url + "/v1/score", json=body_of(), timeout=30, trust_env=False)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_unavailable")
            assert refused.headers["connection"] == "close"
        assert refused.headers["retry-after"].isdecimal()
        assert refused.headers["x-request-id"].startswith("scr_")
        go_on()
        assert [call.result(60).status_code for call in calls] == [200] * 8
        assert server.wait() == 0
        assert server.run_dirs() == []
        assert not [pid for pid in children if stat_of(pid)]


def test_signal_while_clients_keep_coming(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Whoever gets an answer gets a whole one: 200, 429 or 503; afterwards nobody listens."""
    with ServerProcess(tiny_checkpoint, tmp_path, env=light(tmp_path / "plant")) as server:
        seen: Counter[str] = Counter()

        def knock() -> None:
            while True:
                try:
                    answer = httpx.post(server.url + "/v1/score", json=body_of(), timeout=60, trust_env=False)
                except httpx.ConnectError:
                    seen["refused"] += 1
                    return
                except httpx.TransportError as error:
                    seen[f"broken: {error!r}"] += 1
                    return
                seen[str(answer.status_code)] += 1
                assert answer.headers["x-request-id"]

        with ThreadPoolExecutor(8) as pool:
            knocking = [pool.submit(knock) for _ in range(8)]
            wait_for(lambda: seen["200"] > 10, "some answers")
            assert server.stop() == 0
            for client in knocking:
                client.result(30)
        assert not server.lines or "Traceback" not in server.log
        answered = {status for status in seen if not status.startswith(("refused", "broken"))}
        assert answered <= {"200", "429", "503"}
        accepted = len(re.findall(r"call request_id=\S+ route=score status=200", server.log))
        assert accepted == seen["200"], "an accepted call lost its answer"


def test_drain_limit_cuts_calls_off(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """They are told so, and the exit code is 5."""
    with ServerProcess(tiny_checkpoint, tmp_path, "--drain-timeout", "0.5", env=light(tmp_path / "plant")) as server:
        hold_engine(server)
        call = in_background(lambda: server.post(body_of()))
        wait_in_flight(server, 1)
        server.signal(signal.SIGTERM)
        answer = call.result(60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_unavailable")
        assert server.wait() == 5
        assert server.run_dirs() == []


def test_second_signal_stops_at_once(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with ServerProcess(tiny_checkpoint, tmp_path, env=light(tmp_path / "plant")) as server:
        children = server.children()
        hold_engine(server)
        call = in_background(lambda: server.post(body_of()))
        wait_in_flight(server, 1)
        server.signal(signal.SIGTERM)
        wait_stopping(server)
        started = time.monotonic()
        server.signal(signal.SIGINT)
        assert server.wait() == 5
        assert time.monotonic() - started < 5
        assert call.exception(60) is not None or call.result().status_code == 503
        assert not [pid for pid in children if stat_of(pid)]


def test_signal_delivered_twice_is_one_stop(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """timeout(1) and others signal a process and its group: the call in flight still finishes."""
    with ServerProcess(tiny_checkpoint, tmp_path, env=light(tmp_path / "plant")) as server:
        go_on = hold_engine(server)
        call = in_background(lambda: server.post(body_of()))
        wait_in_flight(server, 1)
        server.signal(signal.SIGTERM)
        server.signal(signal.SIGTERM)
        wait_stopping(server)
        go_on()
        assert call.result(60).status_code == 200
        assert server.wait() == 0


def test_engine_that_dies_while_stopping_does_not_hold_the_stop(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with ServerProcess(tiny_checkpoint, tmp_path, env=light(tmp_path / "plant")) as server:
        engine = server.child("engine")
        hold_engine(server)
        call = in_background(lambda: server.post(body_of()))
        wait_in_flight(server, 1)
        server.signal(signal.SIGTERM)
        wait_stopping(server)
        os.kill(engine, signal.SIGKILL)
        assert call.result(60).status_code == 503
        assert server.wait() == 0
        assert server.log.count("started engine-") == 1


def test_signal_while_loading(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """While the model loads calls are told to wait; a signal ends the start, with no call to wait for."""
    with ServerProcess(tiny_checkpoint, tmp_path, ready=False, env=light(tmp_path / "plant")) as server:
        os.kill(server.child("engine"), signal.SIGSTOP)  # a long load
        assert server.get("/healthz").json() == {"ok": True}
        answer = server.post(body_of())
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "warming_up")
        assert answer.headers["retry-after"].isdecimal()
        assert server.get("/readyz").status_code == 503
        assert server.get("/readyz").json() == {"ready": False}
        assert server.get("/livez").json() == {"live": False}
        assert server.get("/v1/models").json()["data"][0]["status"] == "loading"
        assert server.stop() == 0
        assert server.run_dirs() == []


def test_taken_port_is_refused_before_anything_loads(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = ServerProcess(tiny_checkpoint, tmp_path, "--port", str(port), ready=False)
        code = server.start_and_fail()
        assert code == 4
        assert f"port {port} on 127.0.0.1 is taken" in server.log
        assert "started" not in server.log


def test_slow_call_in_flight_finishes(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """A long request is answered in full, far beyond the moment of the signal."""
    with ServerProcess(tiny_checkpoint, tmp_path) as server:
        call = in_background(lambda: server.post(slow_body(prompts=100)))
        wait_in_flight(server, 1)
        server.signal(signal.SIGTERM)
        answer = call.result(60)
        assert answer.status_code == 200
        assert len(answer.json()["results"]) == 100
        assert server.wait() == 0
