"""Faults planted into single processes: what nobody expects to happen."""

import os
import signal
import time
from pathlib import Path

import pytest

from spinf_serve.wire.registry import PROTOCOL_VERSION
from tests.processes.acts import hold_engine, in_background, replaced, wait_in_flight, wait_workers
from tests.support.plant import light
from tests.support.server import ServerProcess, body_of, stat_of, wait_for

BROKEN_PREPROCESSOR = """
import workers.preprocess.preprocessor as module
kept_prepare, kept_assemble = module.Preprocessor.prepare, module.Preprocessor.assemble
def prepare(self, body, header):
    if b"POISON" in body:
        import os
        os._exit(77)
    if b"SURPRISE" in body:
        raise ZeroDivisionError("SURPRISE is what the content said")
    return kept_prepare(self, body, header)
def assemble(self, prepared, result):
    if prepared.log["inputs"] == 3:
        raise ZeroDivisionError("three")
    return kept_assemble(self, prepared, result)
module.Preprocessor.prepare, module.Preprocessor.assemble = prepare, assemble
"""


def test_one_request_never_takes_another_down(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """An unexpected exception: that request alone fails, without its content in the log. One that kills every worker
    that touches it fails alone as well, with others in flight beside it.
    """
    env = light(tmp_path / "plant", preprocess=BROKEN_PREPROCESSOR)
    with ServerProcess(tiny_checkpoint, tmp_path, env=env) as server:
        surprise = server.post(body_of("SURPRISE"))
        assert (surprise.status_code, surprise.json()["error"]["code"]) == (500, "engine_error")
        assert "SURPRISE" not in surprise.text
        inputs = [{"id": str(i), "messages": [{"content": "x"}]} for i in range(3)]
        late = server.post({"inputs": inputs, "scoring": body_of()["scoring"]})
        assert (late.status_code, late.json()["error"]["code"]) == (500, "engine_error")
        wait_for(lambda: "ZeroDivisionError" in server.log, "the traceback in the log")
        assert "SURPRISE" not in server.log

        go_on = hold_engine(server)
        try:
            others = [in_background(lambda: server.post(body_of())) for _ in range(3)]
            wait_in_flight(server, 3)
            poison = server.post(body_of("POISON"))
        finally:
            go_on()
        assert (poison.status_code, poison.json()["error"]["code"]) == (500, "engine_error")
        assert [call.result(60).status_code for call in others] == [200] * 3
        assert server.metric("spinf_workers_lost_total") == 2
        wait_workers(server, 2)
        assert server.post(body_of()).status_code == 200


def test_engine_that_fails_as_a_whole_is_restarted(tiny_checkpoint: Path, tmp_path: Path) -> None:
    code = """
import pathlib
import workers.engine.engine as module
kept = module.ScoringEngine.step
def step(self, arrivals):
    flag = pathlib.Path(FLAG)
    if flag.exists():
        flag.unlink()
        raise RuntimeError("the device is gone")
    return kept(self, arrivals)
module.ScoringEngine.step = step
""".replace("FLAG", repr(str(tmp_path / "flag")))
    env = light(tmp_path / "plant", engine=code)
    with ServerProcess(tiny_checkpoint, tmp_path, env=env) as server:
        assert server.post(body_of()).status_code == 200
        (tmp_path / "flag").touch()
        answer = server.post(body_of())
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_unavailable")
        wait_for(lambda: server.log.count("started engine-") == 2, "the next engine")
        server.wait_ready()
        assert server.post(body_of()).status_code == 200
        assert "the device is gone" in server.log


def test_a_degraded_engine_answers_what_it_has_and_is_replaced(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """As after memory that did not come back: not ready and no new calls, those in flight finish, then a new engine."""
    code = """
import pathlib, time
import workers.engine.engine as module
kept = module.ScoringEngine.step
def step(self, arrivals):
    if pathlib.Path(FLAG).exists() and self.has_work:
        self.degraded = "memory is missing"
        while pathlib.Path(FLAG).exists():
            arrivals()
            time.sleep(0.01)
            if len(self._plans) == 3:
                return kept(self, arrivals)
    return kept(self, arrivals)
module.ScoringEngine.step = step
""".replace("FLAG", repr(str(tmp_path / "flag")))
    env = light(tmp_path / "plant", engine=code)
    with ServerProcess(tiny_checkpoint, tmp_path, env=env) as server:
        (tmp_path / "flag").touch()
        calls = [in_background(lambda: server.post(body_of())) for _ in range(3)]
        found = wait_for(lambda: body if "degraded" in (body := server.get("/readyz").json()) else None, "degraded")
        assert found == {"ready": False, "degraded": "memory is missing"}
        refused = server.post(body_of())
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_unavailable")
        assert refused.headers["retry-after"]
        (tmp_path / "flag").unlink()
        assert [call.result(60).status_code for call in calls] == [200] * 3
        wait_for(lambda: server.log.count("started engine-") == 2, "the next engine")
        server.wait_ready()
        assert server.post(body_of()).status_code == 200
        assert server.metric("spinf_engine_restarts_total") == 1


@pytest.mark.parametrize(
    ("raised", "reason", "traced"),
    [
        ('NotNow("only 2.0 GiB are free: another process holds the rest")', "only 2.0 GiB are free: another", False),
        (r'RuntimeError("CUDA error: out of memory\nSearch for it")', "CUDA error: out of memory", True),
    ],
    ids=["foreseen", "unforeseen"],
)
def test_starts_that_fail_say_why(
    tiny_checkpoint: Path, tmp_path: Path, raised: str, reason: str, traced: bool
) -> None:
    """In the supervisor's line of each and in its last word; a traceback only of what nobody foresaw."""
    code = f"""
import workers.engine.engine as module
from workers.engine.errors import NotNow
def load(config, on_progress=None):
    raise {raised}
module.ScoringEngine.load = load
"""
    with ServerProcess(tiny_checkpoint, tmp_path, ready=False, env=light(tmp_path / "plant", engine=code)) as server:
        assert server.wait(60) == 3
    said = [line for line in server.lines if f"the model cannot be loaded: {reason}" in line]
    assert sum(" supervisor[" in line for line in said) == 3
    last = f"the last time: the model cannot be loaded: {reason}"
    assert said[-1].startswith(f"spinf-serve: the engine crashed 3 times within 10 minutes, {last}")
    assert not any("Search for it" in line for line in said)
    assert ("Traceback" in server.log) is traced


@pytest.mark.parametrize(
    ("raised", "reason"),
    [
        ('OSError(errno.ENOSPC, "No space left", "/full/x")', "[Errno 28] No space left: '/full/x'"),
        ('KeyError("warm-up", 0)', "KeyError('warm-up', 0)"),
    ],
    ids=["full disk", "bug"],
)
def test_what_no_restart_cures_ends_the_start(tiny_checkpoint: Path, tmp_path: Path, raised: str, reason: str) -> None:
    code = f"""
import errno
import workers.engine.engine as module
def warm_up(self, on_progress):
    raise {raised}
module.ScoringEngine.warm_up = warm_up
"""
    with ServerProcess(tiny_checkpoint, tmp_path, ready=False, env=light(tmp_path / "plant", engine=code)) as server:
        assert server.wait(60) == 1
    assert f"spinf-serve: the model cannot be loaded: {reason}\n" in server.log
    assert server.log.count("started engine-") == 1


def test_memory_is_shown_as_long_as_an_engine_holds_it(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """From ready on without a call, to a new frontend too, and nothing between two engines."""
    code = """
import os, pathlib, time
import workers.engine.engine as module
kept_load, kept_stats = module.ScoringEngine.load, module.ScoringEngine.stats
def load(config, on_progress=None):
    while pathlib.Path(FLAG).exists():
        time.sleep(0.01)
    return kept_load(config, on_progress)
def stats(self):
    return kept_stats(self) | {"memory_bytes": os.getpid(), "weights_bytes": 5, "peak_bytes": 6, "busy_s": 2.0}
module.ScoringEngine.load, module.ScoringEngine.stats = load, stats
""".replace("FLAG", repr(str(tmp_path / "flag")))

    def shown() -> list[float]:
        parts = [server.metric("spinf_gpu_memory_part_bytes", part=part) for part in ("weights", "peak", "stored")]
        return [server.metric("spinf_gpu_memory_bytes"), *parts]

    with ServerProcess(tiny_checkpoint, tmp_path, env=light(tmp_path / "plant", engine=code)) as server:
        engine = server.child("engine")
        assert shown() == [engine, 5, 6, 0]
        frontend = server.child("frontend")
        os.kill(frontend, signal.SIGKILL)
        replaced(server, "frontend", {frontend})
        server.wait_ready()
        assert shown() == [engine, 5, 6, 0]
        assert server.metric("spinf_pass_tokens_count") == 0
        (tmp_path / "flag").touch()
        os.kill(engine, signal.SIGKILL)
        wait_for(lambda: not server.is_ready(), "the engine's death")
        assert shown() == [0, 0, 0, 0]
        frontend = server.child("frontend")
        os.kill(frontend, signal.SIGKILL)
        replaced(server, "frontend", {frontend})
        wait_for(lambda: server.get("/livez").status_code == 200, "the next frontend")
        assert shown() == [0, 0, 0, 0]
        (tmp_path / "flag").unlink()
        server.wait_ready()
        assert shown() == [server.child("engine"), 5, 6, 0]
        assert server.child("engine") != engine


@pytest.mark.parametrize("role", ["frontend", "preprocess", "engine"])
def test_another_protocol_version_is_refused(tiny_checkpoint: Path, tmp_path: Path, role: str) -> None:
    """At the handshake, with a clear line and exit code 1."""
    other = "import spinf_serve.wire.codec as c\nc.PROTOCOL_VERSION = 99"
    env = light(tmp_path / "plant", **{role: other})
    with ServerProcess(tiny_checkpoint, tmp_path, ready=False, env=env) as server:
        assert server.wait() == 1
        assert (
            f"speaks wire protocol version 99, this process {PROTOCOL_VERSION}: two versions of spinf-serve"
            in server.log
        )


SOON = """
import spinf_serve.supervisor.restarts as module
kept = module.Replacements.__init__
def soon(self, limit, first_s, most_s, **more):
    kept(self, limit, first_s / 10, most_s / 10, **more)
module.Replacements.__init__ = soon
"""


def test_workers_that_never_come_up_end_the_start(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """A crash loop ends in a decided way: growing waits (here a tenth of them), then exit code 1, nothing left."""
    env = light(tmp_path / "plant", frontend="import os\nos._exit(9)", supervisor=SOON)
    with ServerProcess(tiny_checkpoint, tmp_path, ready=False, env=env) as server:
        children = server.children()
        assert server.wait(60) == 1
        assert "the frontend process died again and again before it was ready" in server.log
        assert server.log.count("started frontend-") == 5
        assert not [pid for pid in children if stat_of(pid)]
        assert server.run_dirs() == []


def test_broken_tokenizer_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in tiny_checkpoint.iterdir():
        (snapshot / path.name).write_bytes(path.read_bytes())
    (snapshot / "tokenizer.json").write_text('{"version": "1.0"}')
    with ServerProcess(snapshot, tmp_path, ready=False, env=light(tmp_path / "plant")) as server:
        assert server.wait() == 1
        assert "spinf-serve: the tokenizer cannot be loaded" in server.log


def test_foreign_workers_folder_is_not_imported(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Started where somebody else's package `workers` lies."""
    for name in ("frontend", "preprocess", "engine"):
        (tmp_path / "workers" / name).mkdir(parents=True)
        (tmp_path / "workers" / name / "__main__.py").write_text("raise SystemExit('a stranger')")
    (tmp_path / "workers" / "__init__.py").touch()
    with ServerProcess(tiny_checkpoint, tmp_path, cwd=tmp_path, env=light(tmp_path / "plant")) as server:
        assert server.post(body_of()).status_code == 200
        assert "a stranger" not in server.log


def test_whole_group_may_be_stopped_and_continued(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Ctrl-Z and fg: silence that the supervisor slept through kills nobody."""
    with ServerProcess(tiny_checkpoint, tmp_path, env=light(tmp_path / "plant")) as server:
        before = server.children()
        for pid in (server.popen.pid, *before):
            os.kill(pid, signal.SIGSTOP)
        wait_for(lambda: (stat_of(server.popen.pid) or "?")[0] == "T", "the stop")
        time.sleep(6)  # longer than the frontend and the workers may be silent
        server.signal(signal.SIGCONT)
        time.sleep(0.5)  # the order in which a group goes on is nobody's choice
        for pid in before:
            os.kill(pid, signal.SIGCONT)
        assert server.post(body_of()).status_code == 200
        assert server.children() == before


def test_nobody_reads_the_log(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Standard error is a full pipe: calls are answered, and the server stops; lines are lost, not calls."""
    with ServerProcess(tiny_checkpoint, tmp_path, env=light(tmp_path / "plant")) as server:
        server.reading.clear()
        for number in range(1000):  # several times what a pipe holds
            assert server.get("/nope", headers={"x-request-id": f"{number:0100}"}).status_code == 404
        assert server.post(body_of()).status_code == 200
        server.signal(signal.SIGTERM)
        assert server.popen.wait(30) == 0
