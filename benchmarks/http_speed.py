"""The same requests in process and over HTTP, several in flight: what the processes and the wire cost.

    python -m benchmarks.http_speed [--model DIR] [--jobs FILE] [--device cuda:0] [--copies 8] [--inputs 8]
        [--in-flight 8] [--queue 8] [--repeats 3]

First the engine runs in this process, then the script starts a server of its own on loopback and sends it the same
bodies, each of `--in-flight` threads over a connection that stays open. Prints figures only after both gave the same
results.
"""

import argparse
import http.client
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import workers.engine  # noqa: F401 - before torch
from benchmarks.job_speed import DEFAULT_JOBS, Use, results_of, use_of
from benchmarks.jobs import copies_of, read_jobs
from benchmarks.probes import machine, percentile
from spinf_serve import Engine

START_S = 300
_LOG_TAIL = 2000


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_ready(port: int, server: subprocess.Popen[bytes], log: Path) -> float:
    """Poll /readyz until it answers 200; returns the seconds that it took."""
    started = time.monotonic()
    while time.monotonic() < started + START_S:
        if server.poll() is not None:
            raise SystemExit(f"the server ended with exit code {server.returncode}:\n{log.read_text()[-_LOG_TAIL:]}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5):
                return time.monotonic() - started
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise SystemExit(f"the server was not ready in {START_S} s:\n{log.read_text()[-_LOG_TAIL:]}")


@contextmanager
def running_server(model: str, flags: Sequence[str]) -> Iterator[tuple[int, float]]:
    """A server of its own on loopback: its port, and the seconds until it was ready."""
    port = free_port()
    start = "from spinf_serve.cli import app; app()"
    command = [sys.executable, "-c", start, "serve", model, "--host", "127.0.0.1", "--port", str(port), *flags]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        with log.open("wb") as file:
            server = subprocess.Popen(command, stdout=file, stderr=file)
        try:
            yield port, wait_ready(port, server, log)
        finally:
            server.terminate()
            server.wait(timeout=120)


class Client:
    """Posts bodies; every thread keeps a connection of its own."""

    def __init__(self, port: int) -> None:
        self.port, self.local = port, threading.local()

    def __call__(self, body: bytes) -> bytes:
        connection = getattr(self.local, "connection", None)
        if connection is None:
            connection = self.local.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        connection.request("POST", "/v1/score", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        data: bytes = response.read()
        if response.status != 200:
            raise SystemExit(f"the server answered {response.status}: {data[:500]!r}")
        return data


def measure(send: Callable[[bytes], bytes], use: Use, repeats: int) -> tuple[list[float], dict[str, Any]]:
    """Seconds of each repeat after a warm one, and the results."""
    walls: list[float] = []
    with ThreadPoolExecutor(use.in_flight) as pool:
        results = results_of(list(pool.map(send, use.bodies)))
        for _ in range(repeats):
            started = time.perf_counter()
            responses = list(pool.map(send, use.bodies))
            walls.append(time.perf_counter() - started)
            if results_of(responses) != results:
                raise SystemExit("NOT PRINTED: two runs gave different results")
    return walls, results


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="snapshot directory or name")
    parser.add_argument("--jobs", type=Path, default=DEFAULT_JOBS, help="job set, JSON or JSON.gz")
    parser.add_argument("--articles", type=int, default=None, help="jobs of the set to use (default: all)")
    parser.add_argument("--copies", type=int, default=8)
    parser.add_argument("--inputs", type=int, default=8, help="articles of a request")
    parser.add_argument("--in-flight", type=int, default=8, help="requests at a time")
    parser.add_argument("--queue", type=int, default=8, help="the server's --queue")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quant", default="auto")
    parser.add_argument("--warmup", choices=("full", "short", "none"), default="full")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-floors", action="store_true", help="ask without the floors of the empty content")
    return parser.parse_args()


def main() -> None:
    """Run and print."""
    args = arguments()
    jobs = copies_of(read_jobs(args.jobs)[: args.articles], args.copies)
    use = use_of("copies", jobs, args.inputs, args.in_flight, floors=not args.no_floors)
    shared = {"device": args.device, "quant": args.quant, "warmup": args.warmup}
    limits = {"max_processed_tokens": 10_000_000, "max_body_bytes": 64 << 20}
    with Engine(args.model, **shared, **limits) as engine:
        direct, expected = measure(engine.score_bytes, use, args.repeats)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in (shared | limits | {"queue": args.queue}).items()]
    with running_server(args.model, flags) as (port, ready):
        wired, results = measure(Client(port), use, args.repeats)
    if results != expected:
        raise SystemExit("NOT PRINTED: the results over HTTP differ from those in process")
    print(machine())
    print(
        f"{args.model}, {args.jobs.name} x{args.copies}: {len(use.bodies)} requests of up to {args.inputs} articles, "
        f"{use.in_flight} in flight, --queue {args.queue}, {use.questions} questions, floors "
        f"{'off' if args.no_floors else 'on, not counted'}; results equal; server ready after {ready:.1f} s"
    )
    for name, walls in (("in process", direct), ("over HTTP", wired)):
        wall = percentile(walls, 0.5)
        print(f"{name:10} {use.questions / wall:9.1f} questions/s  median {wall:.3f} s, best {min(walls):.3f} s")
    print(f"over HTTP = {percentile(direct, 0.5) / percentile(wired, 0.5):.3f} of in process")


if __name__ == "__main__":
    main()
