"""A real server in real processes: started as a user would, watched through /proc, ended without leftovers."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

ROOT = Path(__file__).resolve().parents[2]
START_S = 60.0
"""A tiny checkpoint is ready in a few seconds; a busy machine may take longer."""
STOP_S = 30.0

QUESTION = {"id": "q", "template": " Is it? Answer:{?}", "options": [" yes", " no"]}


def body_of(
    content: str = "hello world", *, queries: list[dict[str, Any]] | None = None, **more: Any
) -> dict[str, Any]:
    """A small valid request."""
    return {"messages": [{"content": content}], "scoring": {"queries": queries or [QUESTION]}, **more}


def slow_body(prompts: int = 400, tokens: int = 60) -> dict[str, Any]:
    """A request that keeps the engine busy for a while: many inputs of some length, each asked on its own."""
    inputs = [{"id": str(i), "messages": [{"content": f"{i} " + "hello world " * tokens}]} for i in range(prompts)]
    return {"inputs": inputs, "scoring": {"queries": [QUESTION], "empty_floor": False}}


def wait_for[T](probe: Callable[[], T | None], what: str, seconds: float = START_S) -> T:
    """Poll until `probe` returns something true; fails with `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        if found := probe():
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.02)


class ServerProcess:
    """`spinf-serve serve SNAPSHOT --device cpu` on a free loopback port; a context manager.

    `run_parent` is where its run directory goes (through TMPDIR); `log` collects its standard error.
    """

    def __init__(
        self,
        snapshot: Path,
        tmp_path: Path,
        *flags: str,
        env: dict[str, str] | None = None,
        ready: bool = True,
        workers: int = 2,
        cwd: Path | None = None,
        run_parent: Path | None = None,
    ) -> None:
        # Not under tmp_path: a socket's path must stay short.
        self.run_parent = run_parent or Path(tempfile.mkdtemp(prefix="run-"))
        self._wait_ready = ready
        self._command = [
            *(sys.executable, "-c", "from spinf_serve.cli import app; app()", "serve", str(snapshot)),
            *("--device", "cpu", "--host", "127.0.0.1", "--port", "0", "--preprocess-workers", str(workers)),
            *("--token-budget", "2048", "--max-tokens", "4096", "--warmup", "short", *flags),
        ]
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("SPINF_", "XDG_RUNTIME"))}
        self._env = {**clean, "PYTHONPATH": str(ROOT), "TMPDIR": str(self.run_parent), "OMP_NUM_THREADS": "1"}
        self._env |= {"SPINF_OFFICIAL_PACKS": "0"}  # the tests reach no network
        self._env |= env or {}
        self._cwd = cwd or tmp_path
        self.lines: list[str] = []
        self.reading = threading.Event()  # cleared: nobody reads its log
        self.reading.set()
        self.url = ""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if kind is not None:
            print(self.log, file=sys.stderr)

    def start(self) -> None:
        """Start it and wait for its address, and for ready unless told otherwise."""
        self._spawn()
        try:
            self.url = wait_for(self._address, "the server's address")
            self.client.base_url = httpx.URL(self.url)
            if self._wait_ready:
                self.wait_ready()
        except BaseException:
            self.close()
            print(self.log, file=sys.stderr)
            raise

    def start_and_fail(self) -> int:
        """Start it where it must refuse to; returns its exit code."""
        self._spawn()
        try:
            return self.wait()
        finally:
            self.close()

    def _spawn(self) -> None:
        self.popen = subprocess.Popen(
            self._command, env=self._env, cwd=self._cwd, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.client = httpx.Client(timeout=60.0, trust_env=False)

    def _read(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            self.reading.wait()
            self.lines.append(line)

    def _address(self) -> str | None:
        if self.popen.poll() is not None:
            raise AssertionError(f"the server ended with {self.popen.returncode}:\n{self.log}")
        found = re.search(r'listens on (http://[^\s,"]+)', self.log)
        return found[1] if found else None

    @property
    def log(self) -> str:
        return "".join(self.lines)

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self.client.get(path, **more)

    def post(self, body: Any, path: str = "/v1/score", **more: Any) -> httpx.Response:
        content = body if isinstance(body, bytes | str) else json.dumps(body)
        return self.client.post(path, content=content, **more)

    def is_ready(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return self.get("/readyz").status_code == 200
        return False

    def wait_ready(self, seconds: float = START_S) -> None:
        """Until /readyz is 200; fails when the server ended."""

        def probe() -> bool:
            if self.popen.poll() is not None:
                raise AssertionError(f"the server ended with {self.popen.returncode}:\n{self.log}")
            return self.is_ready()

        wait_for(probe, "ready", seconds)

    def metric(self, name: str, **labels: str) -> float:
        """The value of one series of /metrics; 0.0 when it is not there."""
        wanted = {f'{key}="{value}"' for key, value in labels.items()}
        for line in self.get("/metrics").text.splitlines():
            series, _, value = line.rpartition(" ")
            base, _, found = series.partition("{")
            if base == name and wanted <= set(found.rstrip("}").split(",")):
                return float(value)
        return 0.0

    def children(self, role: str | None = None) -> list[int]:
        """Pids of the living children, oldest first; `role` is frontend, preprocess or engine."""
        found = []
        for pid in descendants(self.popen.pid):
            if role is None or f"workers.{role}" in command_of(pid):
                found.append(pid)
        return found

    def child(self, role: str) -> int:
        """The pid of the one child of a role, once it is there."""
        return wait_for(lambda: next(iter(self.children(role)), None), f"a {role} process")

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def wait(self, seconds: float = STOP_S) -> int:
        """Exit code of the supervisor, once it and the reader of its log ended."""
        code = self.popen.wait(seconds)
        self._reader.join(timeout=5)
        return code

    def stop(self) -> int:
        """SIGTERM and its exit code."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def run_dirs(self) -> list[Path]:
        return sorted(self.run_parent.glob("spinf-serve-*"))

    def close(self) -> None:
        """End it whatever state it is in."""
        self.reading.set()
        if self.popen.poll() is None:
            self.signal(signal.SIGTERM)
            try:
                self.popen.wait(10)
            except subprocess.TimeoutExpired:
                self.popen.kill()
                self.popen.wait(10)
        self.client.close()
        self._reader.join(timeout=5)
        assert self.popen.stderr is not None
        self.popen.stderr.close()
        shutil.rmtree(self.run_parent, ignore_errors=True)


def descendants(pid: int) -> list[int]:
    """Living (also stopped, not zombie) descendants of a process, by pid."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and (found := stat_of(int(entry.name))):
            parents[int(entry.name)] = found[1]
    alive, frontier = [], [pid]
    while frontier:
        parent = frontier.pop()
        mine = [child for child, its_parent in parents.items() if its_parent == parent]
        frontier += mine
        alive += [child for child in mine if is_alive(child)]
    return sorted(alive)


def stat_of(pid: int) -> tuple[str, int] | None:
    """(state letter, parent pid) of a process; None when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    state, parent = text[text.rindex(")") + 2 :].split()[:2]
    return state, int(parent)


def is_alive(pid: int) -> bool:
    found = stat_of(pid)
    return found is not None and found[0] not in "ZX"


def is_zombie(pid: int) -> bool:
    found = stat_of(pid)
    return found is not None and found[0] == "Z"


def command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """SIGSTOP a process for a while (SIGCONT at the end, if it still lives)."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
