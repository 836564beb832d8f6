"""The same body in process and over HTTP: what the processes and the wire cost.

    python -m benchmarks.http_speed [--jobs FILE] [--articles 4] [--model demo]

Prints figures only after both gave the same results.
"""

import argparse
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import workers.engine  # noqa: F401 - before torch
from benchmarks.cpu_speed import DEFAULT_JOBS, best_seconds
from benchmarks.jobs import num_questions, read_jobs, score_body
from spinf_serve import Engine

START_S = 300


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    """Poll /readyz until it answers 200."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise SystemExit(f"the server ended with exit code {server.returncode}")
        try:
            with urllib.request.urlopen(f"{url}/readyz", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise SystemExit("the server was not ready in time")


def post(url: str, body: bytes) -> dict[str, Any]:
    """The response to one body."""
    request = urllib.request.Request(f"{url}/v1/score", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


def measure_in_process(model: str, body: bytes, repeats: int) -> tuple[float, Any]:
    """Best seconds and the results."""
    with Engine(model, device="cpu") as engine:
        results = engine.score(body)["results"]
        return best_seconds(lambda: engine.score(body), repeats), results


def measure_http(model: str, body: bytes, repeats: int) -> tuple[float, Any]:
    """The same against a server of its own on loopback."""
    port = free_port()
    start = "from spinf_serve.cli import app; app()"
    flags = ["--device", "cpu", "--host", "127.0.0.1", "--port", str(port)]
    command = [sys.executable, "-c", start, "serve", model, *flags]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_ready(url, server)
        results = post(url, body)["results"]
        return best_seconds(lambda: post(url, body), repeats), results
    finally:
        server.terminate()
        server.wait(timeout=60)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=Path, default=DEFAULT_JOBS, help="job set, JSON or JSON.gz")
    parser.add_argument("--articles", type=int, default=4, help="jobs of the set to use")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    jobs = read_jobs(args.jobs)[: args.articles]
    body = json.dumps(score_body(jobs)).encode()
    direct_s, direct = measure_in_process(args.model, body, args.repeats)
    http_s, over_http = measure_http(args.model, body, args.repeats)
    if direct != over_http:
        raise SystemExit("NOT PRINTED: the results over HTTP differ from those in process")
    questions = num_questions(jobs)
    print(
        f"{args.model}, {args.jobs.name}, {len(jobs)} articles, {questions} questions and their floors; results equal"
    )
    print(f"in process  {questions / direct_s:8.1f} questions/s")
    print(f"over HTTP   {questions / http_s:8.1f} questions/s  ({http_s / direct_s - 1:+.1%} time)")


if __name__ == "__main__":
    main()
