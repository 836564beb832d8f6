"""Every row of the failure table, with real processes really killed."""

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.processes.acts import hold_engine, in_background, replaced, wait_in_flight, wait_workers
from tests.support.plant import light
from tests.support.server import (
    ServerProcess,
    body_of,
    command_of,
    is_alive,
    is_zombie,
    stat_of,
    stopped,
    wait_for,
)


def test_killed_worker_costs_no_request(server: ServerProcess) -> None:
    """Its requests are done by another worker; the worker is replaced."""
    expected = server.post(body_of()).json()["results"]
    workers = set(server.children("preprocess"))
    lost = server.metric("spinf_workers_lost_total")
    go_on = hold_engine(server)
    try:
        calls = [in_background(lambda: server.post(body_of())) for _ in range(3)]
        wait_in_flight(server, 3)
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        replaced(server, "preprocess", workers)
    finally:
        go_on()
    answers = [call.result(60) for call in calls]
    assert [answer.status_code for answer in answers] == [200] * 3
    assert all(answer.json()["results"] == expected for answer in answers)
    assert server.metric("spinf_workers_lost_total") == lost + 2
    assert not [pid for pid in workers if stat_of(pid)], "a dead worker was not reaped"


def test_request_that_loses_two_workers_fails_alone(server: ServerProcess) -> None:
    """The request whose workers die twice gets 500; one that came in between is answered."""
    wait_workers(server, 2)
    go_on = hold_engine(server)
    try:
        victim = in_background(lambda: server.post(body_of("the victim")))
        wait_in_flight(server, 1)
        first = set(server.children("preprocess"))
        for pid in first:
            os.kill(pid, signal.SIGKILL)
        second = set(replaced(server, "preprocess", first))
        wait_for(lambda: server.metric("spinf_requests_running") == 1 or None, "the second attempt")
        bystander = in_background(lambda: server.post(body_of("somebody else")))
        wait_in_flight(server, 2)
        time.sleep(0.2)  # both are with their workers now; which one has the victim cannot be seen from outside
        for pid in second:
            os.kill(pid, signal.SIGKILL)
        replaced(server, "preprocess", second)
    finally:
        go_on()
    answer = victim.result(60)
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "engine_error"
    assert answer.json()["error"]["type"] == "api_error"
    assert answer.headers["x-request-id"] == answer.json()["request_id"]
    assert bystander.result(60).status_code == 200


def test_killed_frontend_comes_back_on_the_same_port(server: ServerProcess) -> None:
    """The engine and the workers go on, the drain state survives, a result without a caller is dropped and counted."""
    wait_workers(server, 2)
    others = [server.child("engine"), *server.children("preprocess")]
    frontend = server.child("frontend")
    assert server.client.post("/v0/drain").json() == {"draining": True}
    go_on = hold_engine(server)
    try:
        abandoned = in_background(lambda: server.post(body_of()))
        wait_in_flight(server, 1)
        os.kill(frontend, signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            abandoned.result(60)
        # Not refused: the port stays open, the call waits for the next frontend.
        waiting = in_background(lambda: httpx.get(server.url + "/healthz", timeout=60, trust_env=False))
        replaced(server, "frontend", {frontend})
        assert waiting.result(60).status_code == 200
    finally:
        go_on()
    wait_for(lambda: server.metric("spinf_results_dropped_total") == 1, "the dropped result")
    assert server.get("/readyz").json() == {"ready": False, "draining": True}
    assert server.get("/livez").status_code == 200
    assert server.post(body_of()).status_code == 200, "a draining server answers calls"
    assert server.client.delete("/v0/drain").json() == {"draining": False}
    assert server.is_ready()
    assert [server.child("engine"), *server.children("preprocess")] == others


def test_frontend_killed_again_and_again_comes_back(server: ServerProcess) -> None:
    for _ in range(3):
        frontend = server.child("frontend")
        server.wait_ready()
        os.kill(frontend, signal.SIGKILL)
        replaced(server, "frontend", {frontend})
    server.wait_ready()
    assert server.post(body_of()).status_code == 200


HELD = """
import pathlib, time
import workers.engine.engine as module
kept_submit, kept_step = module.ScoringEngine.submit, module.ScoringEngine.step
came = []
def submit(self, key, plan):
    kept_submit(self, key, plan)
    came.append(key)
    pathlib.Path(CAME).write_text(str(len(came)))
def step(self, arrivals):
    while pathlib.Path(HOLD).exists():
        arrivals()
        time.sleep(0.005)
    return kept_step(self, arrivals)
module.ScoringEngine.submit, module.ScoringEngine.step = submit, step
"""


def test_client_that_leaves_costs_no_pass(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """What it had queued is cancelled, in the engine too, and its place is free again.

    The engine is held in the pass of a first call, and a last one comes after all who leave: with one worker, in this
    order everywhere.
    """
    hold, came = tmp_path / "hold", tmp_path / "came"
    code = HELD.replace("HOLD", repr(str(hold))).replace("CAME", repr(str(came)))
    env = light(tmp_path / "plant", engine=code)
    with ServerProcess(tiny_checkpoint, tmp_path, workers=1, env=env) as server:
        hold.touch()
        first = in_background(lambda: server.post(body_of()))
        wait_in_flight(server, 1)
        for _ in range(7):  # more than fit at once: each must give its place back
            content = json.dumps(body_of()).encode()
            with socket.create_connection(("127.0.0.1", server.port)) as caller:
                caller.sendall(
                    b"POST /v1/score HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(content) + content
                )
                wait_in_flight(server, 2)
            wait_in_flight(server, 1)
        last = in_background(lambda: server.post(body_of()))
        wait_for(lambda: came.exists() and came.read_text() == "9", "the last call in the engine")
        hold.unlink()
        assert [call.result(60).status_code for call in (first, last)] == [200] * 2
        answered = server.metric("spinf_tokens_total", kind="packed")
        assert answered > 0
        wait_for(lambda: server.metric("spinf_pass_tokens_sum") >= answered, "the engine's reports")
        assert server.metric("spinf_pass_tokens_sum") == answered, "the engine ran more than the answered calls"
        wait_for(lambda: "status=499" in server.log, "the line of the calls whose callers left")


def test_killed_engine_fails_what_it_held_and_comes_back(server: ServerProcess) -> None:
    expected = server.post(body_of()).json()["results"]
    engine = server.child("engine")
    go_on = hold_engine(server)
    calls = [in_background(lambda: server.post(body_of())) for _ in range(3)]
    wait_in_flight(server, 3)
    os.kill(engine, signal.SIGKILL)
    del go_on
    for call in calls:
        answer = call.result(60)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "model_unavailable"
        assert answer.headers["retry-after"].isdecimal()
    readiness = server.get("/readyz")
    assert readiness.status_code == 503
    assert readiness.json() == {"ready": False, "error": "the engine is being restarted"}
    assert server.get("/livez").json() == {"live": True}
    assert server.get("/healthz").status_code == 200
    refused = server.post(body_of())
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_unavailable")
    assert refused.headers["retry-after"].isdecimal()
    replaced(server, "engine", {engine})
    server.wait_ready()
    assert server.post(body_of()).json()["results"] == expected
    assert server.metric("spinf_engine_restarts_total") == 1


@pytest.fixture(scope="module")
def impatient(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One that takes a silence of two seconds for death."""
    soon = "import spinf_serve.supervisor.process as module\nmodule.SILENCE_S = dict.fromkeys(module.SILENCE_S, 2.0)"
    folder = tmp_path_factory.mktemp("impatient")
    with ServerProcess(tiny_checkpoint, folder, env=light(folder / "plant", supervisor=soon)) as running:
        yield running


def test_stopped_worker_counts_as_dead(impatient: ServerProcess) -> None:
    """SIGSTOP: no heartbeat, so it is killed, and what it held is answered by another.

    One at a time: a call that loses two workers fails by the rules, and how soon each is noticed is a matter of load.
    """
    for _ in range(2):
        wait_workers(impatient, 2)
        worker = impatient.children("preprocess")[0]
        os.kill(worker, signal.SIGSTOP)
        calls = [in_background(lambda: impatient.post(body_of())) for _ in range(4)]
        assert [call.result(60).status_code for call in calls] == [200] * 4
        replaced(impatient, "preprocess", {worker})
        wait_for(lambda worker=worker: worker not in impatient.children("preprocess"), "the end of the stopped worker")
    wait_workers(impatient, 2)


def test_stopped_frontend_counts_as_dead(impatient: ServerProcess) -> None:
    frontend = impatient.child("frontend")
    os.kill(frontend, signal.SIGSTOP)
    replaced(impatient, "frontend", {frontend})
    impatient.wait_ready()


def test_stopped_engine_counts_as_dead(impatient: ServerProcess) -> None:
    """No heartbeat: the call gets its 503, the engine is replaced."""
    engine = impatient.child("engine")
    os.kill(engine, signal.SIGSTOP)
    answer = impatient.post(body_of())
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_unavailable")
    replaced(impatient, "engine", {engine})
    impatient.wait_ready()


def test_third_engine_crash_ends_the_server(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Exit code 3, nothing left behind."""
    with ServerProcess(tiny_checkpoint, tmp_path, env=light(tmp_path / "plant")) as server:
        for crash in range(3):
            server.wait_ready()
            engine = server.child("engine")
            children = server.children()
            os.kill(engine, signal.SIGKILL)
            if crash < 2:
                replaced(server, "engine", {engine})
        assert server.wait() == 3
        assert "the engine crashed 3 times within 10 minutes" in server.log
        assert not [pid for pid in children if stat_of(pid)]
        assert server.run_dirs() == []


def test_children_die_with_a_killed_supervisor(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Within a second, a stopped one too; the next start cleans up the run directory."""
    with ServerProcess(tiny_checkpoint, tmp_path, env=light(tmp_path / "plant")) as server:
        children = server.children()
        assert len(children) == 4
        with stopped(server.child("engine")):
            server.signal(signal.SIGKILL)
            server.popen.wait(10)
            killed = time.monotonic()
            wait_for(lambda: not [pid for pid in children if is_alive(pid)], "the end of all children", 5)
            assert time.monotonic() - killed < 1.5
        stale = server.run_dirs()
        assert len(stale) == 1
        with ServerProcess(
            tiny_checkpoint, tmp_path, ready=False, run_parent=server.run_parent, env=light(tmp_path / "plant")
        ) as second:
            assert len(second.run_dirs()) == 1
            assert second.run_dirs() != stale
            assert second.stop() == 0
            assert second.run_dirs() == []


def test_pass_over_the_watchdog_restarts_the_engine(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """A pass that runs too long: its calls get 503, the engine is killed and replaced, the server goes on."""
    code = """
import pathlib, time
import workers.engine.engine as module
kept = module.ScoringEngine.step
def step(self, arrivals):
    while pathlib.Path(FLAG).exists():
        time.sleep(0.01)
    return kept(self, arrivals)
module.ScoringEngine.step = step
""".replace("FLAG", repr(str(tmp_path / "flag")))
    env = light(tmp_path / "plant", engine=code)
    with ServerProcess(tiny_checkpoint, tmp_path, "--watchdog", "1", env=env) as server:
        engine = server.child("engine")
        (tmp_path / "flag").touch()
        answer = server.post(body_of())
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_unavailable")
        (tmp_path / "flag").unlink()
        replaced(server, "engine", {engine})
        assert "stuck in one step" in server.log
        server.wait_ready()
        assert server.post(body_of()).status_code == 200


def test_model_that_cannot_be_loaded_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Printed, exit code 1, no restart: no retry cures it."""
    snapshot = tmp_path / "broken"
    snapshot.mkdir()
    for path in tiny_checkpoint.iterdir():
        (snapshot / path.name).write_bytes(path.read_bytes())
    config = json.loads((snapshot / "config.json").read_text())
    config["hidden_size"] *= 2
    (snapshot / "config.json").write_text(json.dumps(config))
    server = ServerProcess(snapshot, tmp_path, ready=False)
    with server:
        assert server.wait() == 1
        assert server.log.count("started engine-") == 1
        assert "spinf-serve: the model cannot be loaded: " in server.log
        assert server.run_dirs() == []


def test_snapshot_that_is_not_there_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "cut"
    snapshot.mkdir()
    for path in tiny_checkpoint.iterdir():
        (snapshot / path.name).write_bytes(path.read_bytes())
    weights = snapshot / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with ServerProcess(snapshot, tmp_path, ready=False, env=light(tmp_path / "plant")) as server:
        assert server.wait() == 1
        assert "its header says" in server.log
        assert "Traceback" not in server.log


def test_children_know_no_secret_and_no_terminal(server: ServerProcess) -> None:
    """Nothing in argv but the run directory, no setting in the environment, standard input closed."""
    for pid in server.children():
        words = command_of(pid).split()
        assert words[1:3] == ["-P", "-m"]
        assert words[3].startswith("workers.")
        assert len(words) == 5
        assert "trusted" not in command_of(pid)
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        assert b"SPINF_" not in environment
        assert os.readlink(f"/proc/{pid}/fd/0") == "/dev/null"
    run_dir = Path(command_of(server.child("engine")).split()[4])
    assert run_dir.stat().st_mode & 0o777 == 0o700


def test_children_ignore_terminal_signals(server: ServerProcess) -> None:
    before = server.children()
    for pid in before:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(pid, number)
    assert server.post(body_of()).status_code == 200
    assert server.children() == before


def test_hangup_is_ignored_without_a_terminal(server: ServerProcess) -> None:
    server.signal(signal.SIGHUP)
    wait_for(lambda: "SIGHUP is ignored" in server.log, "the line about SIGHUP")
    assert server.post(body_of()).status_code == 200


def test_only_the_engine_loads_torch(server: ServerProcess) -> None:
    for pid in [server.popen.pid, *server.children("frontend"), *server.children("preprocess")]:
        assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()
    assert "libtorch" in Path(f"/proc/{server.child('engine')}/maps").read_text()


def test_no_zombies(server: ServerProcess) -> None:
    assert not [pid for pid in server.children() if is_zombie(pid)]
