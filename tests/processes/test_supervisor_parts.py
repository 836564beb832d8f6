"""The supervisor's parts, each alone: run directories, sockets, restarts, logs, the child's environment."""

import json
import logging
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from spinf_serve import logs
from spinf_serve.refusal import StartRefused
from spinf_serve.supervisor import process, rundir
from spinf_serve.supervisor.listen import PortTaken, listen, url_of
from spinf_serve.supervisor.loop import Supervisor
from spinf_serve.supervisor.process import Process, child_environment, death_of
from spinf_serve.supervisor.restarts import CrashWindow, Replacements
from spinf_serve.supervisor.rundir import RunDir, clean_stale, owner_pid, start_time


def test_run_dir_is_private_and_removed(socket_dir: Path) -> None:
    made = RunDir.create(str(socket_dir / "new" / "folder"))
    assert made.path.stat().st_mode & 0o777 == 0o700
    assert owner_pid(made.path) == os.getpid()
    assert Path(made.control).parent == made.path
    made.remove()
    assert not made.path.exists()


def test_run_dirs_of_living_supervisors_stay(socket_dir: Path) -> None:
    first = RunDir.create(str(socket_dir))
    second = RunDir.create(str(socket_dir))
    assert first.path.exists()
    first.remove()
    second.remove()


def leftover(base: Path, name: str, owner: str | None) -> Path:
    path = base / f"{rundir.PREFIX}{name}"
    path.mkdir()
    if owner is not None:
        (path / "e1").touch()
        (path / rundir.OWNER).write_text(owner)
    return path


def test_stale_run_dirs_are_cleaned(tmp_path: Path) -> None:
    own = start_time(os.getpid())
    dead = leftover(tmp_path, "dead", "4194303 1")
    reused = leftover(tmp_path, "reused", f"{os.getpid()} {own - 1 if own else 0}")
    garbage = leftover(tmp_path, "garbage", "what")
    alive = leftover(tmp_path, "alive", f"{os.getpid()} {own}")
    fresh = leftover(tmp_path, "fresh", None)
    old = leftover(tmp_path, "old", None)
    os.utime(old, (time.time() - 3600,) * 2)
    somebodys = leftover(tmp_path, "data", None)
    (somebodys / "notes.txt").touch()
    os.utime(somebodys, (time.time() - 3600,) * 2)
    other = tmp_path / "other"
    other.mkdir()
    link = tmp_path / f"{rundir.PREFIX}link"
    link.symlink_to(other)
    assert set(clean_stale(tmp_path)) == {dead, reused, old}
    assert alive.exists()
    assert garbage.exists()
    assert (somebodys / "notes.txt").exists()
    assert fresh.exists()
    assert link.exists()
    assert not dead.exists()


def test_long_ipc_dir_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartRefused, match="choose a shorter --ipc-dir"):
        RunDir.create(str(tmp_path / ("x" * 80)))


def test_unusable_ipc_dir_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartRefused, match="no directory for the processes' sockets"):
        RunDir.create(str(tmp_path / "file" / "below"))


def test_odd_runtime_directories_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A login's runtime directory may be too long, or gone."""
    long = tmp_path / ("x" * 90)
    long.mkdir()
    for odd in (long, tmp_path / "gone"):
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(odd))
        made = RunDir.create(None)
        assert odd not in made.path.parents
        made.remove()


def test_listening() -> None:
    (opened,) = listen("127.0.0.1", 0)
    port = opened.getsockname()[1]
    assert url_of(opened) == f"http://127.0.0.1:{port}"
    with pytest.raises(PortTaken, match=f"port {port} on 127.0.0.1 is taken"):
        listen("127.0.0.1", port)
    opened.close()
    (again,) = listen("127.0.0.1", port)
    again.close()


@pytest.mark.skipif(not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists(), reason="no IPv6 on this machine")
@pytest.mark.parametrize("host", ["::1", "[::1]", "::"])
def test_listening_on_ipv6(host: str) -> None:
    (opened,) = listen(host, 0)
    port = opened.getsockname()[1]
    assert url_of(opened) == f"http://[{host.strip('[]')}]:{port}"
    socket.create_connection(("::1", port)).close()
    if host == "::":
        socket.create_connection(("127.0.0.1", port)).close()
    opened.close()


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1", "x" * 300])
def test_hosts_that_are_not_here_are_refused(host: str) -> None:
    with pytest.raises(StartRefused) as refused:
        listen(host, 0)
    assert not isinstance(refused.value, PortTaken)


def test_crashes_are_counted_in_a_window() -> None:
    window = CrashWindow(3, 600.0, first_s=0.5, most_s=30.0)
    assert window.crashed(0.0) == 0.5
    assert window.crashed(500.0) == 1.0
    assert window.crashed(601.0) == 1.0, "the first is forgotten"
    assert window.crashed(700.0) is None


def test_replacements() -> None:
    plan = Replacements(3, first_s=0.5, most_s=2.0, free=2, short_s=10.0)
    assert [plan.died(None), plan.died(None)] == [0.5, 1.0]
    plan.ready()
    assert [plan.died(None), plan.died(None), plan.died(None)] == [0.5, 1.0, None]
    plan.ready()
    assert [plan.died(1.0) for _ in range(7)] == [0.0, 0.0, 0.5, 1.0, 2.0, 2.0, 2.0]
    assert plan.died(100.0) == 0.0
    assert plan.died(1.0) == 0.0


def test_children_get_no_settings_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPINF_TOKEN", "secret")
    monkeypatch.setenv("SPINF_CACHE_DIRS", "/x")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    environment = child_environment()
    assert "SPINF_TOKEN" not in environment
    assert environment["CUDA_VISIBLE_DEVICES"] == "1"


@pytest.mark.parametrize(("role", "seconds"), [("frontend", 5.0), ("preprocess", 5.0), ("engine", 10.0)])
def test_how_long_a_child_may_be_silent(monkeypatch: pytest.MonkeyPatch, role: str, seconds: float) -> None:
    monkeypatch.setattr(process, "Outbox", Mock())
    monkeypatch.setattr(subprocess, "Popen", Mock())
    child = Process(role, Mock(), now=0.0)
    child.hello("ipc://x", 1.0)
    child.became_ready(2.0)
    child.beat(0.0, 3.0)
    assert child.overdue(3.0 + seconds, watchdog_s=0.0) is None
    assert child.overdue(3.1 + seconds, watchdog_s=0.0) == f"no heartbeat for {seconds:.0f} s"
    child.forgive(0.2)
    assert child.overdue(3.1 + seconds, watchdog_s=0.0) is None


def test_a_hung_child_is_killed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large process needs a moment to die, and the supervisor looks ten times a second."""
    monkeypatch.setattr(process, "Outbox", Mock())
    monkeypatch.setattr(subprocess, "Popen", lambda *_args, **_more: Mock(pid=4_000_000, returncode=None))
    signals = Mock()
    monkeypatch.setattr(os, "kill", signals)
    child = Process("engine", Mock(), now=0.0)
    child.hello("ipc://x", 1.0)
    supervisor = Mock(_processes={child.name: child}, _settings=Mock(watchdog=0.0))
    for tick in range(5):
        Supervisor._watch(supervisor, 1000.0 + tick / 10)
    assert signals.call_count == 1


def test_deaths_have_names() -> None:
    assert (death_of(-9), death_of(3), death_of(-200)) == ("SIGKILL", "exit status 3", "signal 200")


def record(message: str, **values: object) -> logging.LogRecord:
    made = logging.LogRecord("x", logging.INFO, __file__, 1, message, (), None)
    made.__dict__.update(logs.facts(**values))
    return made


def test_text_lines_cannot_be_forged() -> None:
    line = logs.TextFormatter("frontend", False).format(
        record("call\nfake", caller_id='x status=200 "q"', status=400, total_ms=1.26, code=None)
    )
    assert "\n" not in line
    assert line.endswith(
        f'frontend[{os.getpid()}] call\\nfake caller_id="x status=200 \\"q\\"" status=400 total_ms=1.3'
    )


def test_json_lines() -> None:
    entry = json.loads(logs.JsonFormatter("engine", False).format(record('a "b"\n', status=200)))
    assert (entry["message"], entry["status"], entry["process"]) == ('a "b"\n', 200, "engine")


@pytest.mark.parametrize("hide", [True, False])
def test_tracebacks_may_hide_what_a_request_said(hide: bool) -> None:
    made = record("failed")
    try:
        try:
            int("the content")
        except ValueError as error:
            raise KeyError("another content") from error
    except KeyError:
        made.exc_info = sys.exc_info()
    text = logs.TextFormatter("preprocess", hide).format(made)
    assert ("content" in text) is not hide
    assert "ValueError" in text
    assert "KeyError" in text
    assert Path(__file__).name in text
