"""The same job set sent to any server with OpenAI-style completions, one request per question: the way without spinf.

    python -m benchmarks.completions_client --url http://127.0.0.1:8000 [--model NAME] [--jobs FILE] [--copies 8]
        [--in-flight 128] [--top 20] [--repeats 2]

Each question is one `POST /v1/completions` of the whole prompt, the article's text first, with `max_tokens` 1 and the
`--top` most probable tokens. A server that keeps prefixes is given its chance: an article's first question goes ahead,
and the others follow once it is answered (`--all-at-once` sends them together).

Prints questions per second, and how many options were among the tokens that came back: the others have no score at all.
An option counts as found by its whole text or, where it is several tokens, by the token that it begins with.
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.jobs import Json, copies_of, num_questions, read_jobs

DEFAULT_JOBS = Path(__file__).parent / "jobs" / "town_news.json"
_TIMEOUT_S = 600


@dataclass
class Answers:
    """Counts of one run. tokens: prompt tokens as the server reports them, prefixes that it kept among them."""

    questions: int = 0
    tokens: int = 0
    options: int = 0
    found: int = 0
    whole: int = 0  # questions with every option found
    latencies: list[float] = field(default_factory=list)


def prompt_of(job: Json, cell: Json) -> str:
    """The whole prompt of one question."""
    text: str = cell["template"].replace("{X}", job["text"]).replace("{F}", cell["phrase"])
    return text


def top_tokens(response: Json) -> dict[str, float]:
    """Token → log-probability at the one place that was sampled."""
    logprobs = response["choices"][0]["logprobs"]
    top = logprobs["top_logprobs"][0]
    if isinstance(top, list):  # some servers list objects
        return {entry["token"]: entry["logprob"] for entry in top}
    return dict(top)


def is_found(option: str, tokens: dict[str, float]) -> bool:
    """Whether the option, or the token that it begins with, is among the tokens."""
    return any(token.strip() and option.startswith(token) for token in tokens)


class CompletionsClient:
    """Sends questions, at most `in_flight` at a time."""

    def __init__(self, http: httpx.AsyncClient, model: str, in_flight: int, top: int) -> None:
        self.http, self.model, self.top = http, model, top
        self.free = asyncio.Semaphore(in_flight)
        self.answers = Answers()

    async def ask(self, job: Json, cell: Json) -> None:
        """One question."""
        body = {
            "model": self.model,
            "prompt": prompt_of(job, cell),
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": self.top,
        }
        async with self.free:
            started = time.perf_counter()
            response = await self.http.post("/v1/completions", json=body)
            spent = time.perf_counter() - started
        if response.status_code != 200:
            raise SystemExit(f"the server answered {response.status_code}: {response.text[:500]}")
        self._count(response.json(), cell, spent)

    def _count(self, response: dict[str, Any], cell: Json, spent: float) -> None:
        answers, tokens = self.answers, top_tokens(response)
        found = sum(is_found(f" {option}", tokens) for option in cell["pair"])
        answers.questions += 1
        answers.tokens += (response.get("usage") or {}).get("prompt_tokens", 0)
        answers.options += len(cell["pair"])
        answers.found += found
        answers.whole += found == len(cell["pair"])
        answers.latencies.append(spent)

    async def ask_article(self, job: Json, *, prefix_first: bool) -> None:
        """All questions of one article."""
        cells = job["cells"]
        if prefix_first:
            await self.ask(job, cells[0])
            cells = cells[1:]
        await asyncio.gather(*(self.ask(job, cell) for cell in cells))


async def run(
    url: str, model: str | None, jobs: Sequence[Json], in_flight: int, top: int, *, prefix_first: bool = True
) -> tuple[Answers, float]:
    """All questions of all articles; the counts and the wall seconds."""
    limits = httpx.Limits(max_connections=in_flight, max_keepalive_connections=in_flight)
    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, limits=limits) as http:
        if model is None:
            listed = await http.get("/v1/models")
            model = listed.json()["data"][0]["id"]
        client = CompletionsClient(http, model, in_flight, top)
        started = time.perf_counter()
        await asyncio.gather(*(client.ask_article(job, prefix_first=prefix_first) for job in jobs))
        return client.answers, time.perf_counter() - started


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", default=None, help="default: the first that the server lists")
    parser.add_argument("--jobs", type=Path, default=DEFAULT_JOBS, help="job set, JSON or JSON.gz")
    parser.add_argument("--articles", type=int, default=None, help="jobs of the set to use (default: all)")
    parser.add_argument("--copies", type=int, default=1)
    parser.add_argument("--in-flight", type=int, default=128)
    parser.add_argument("--top", type=int, default=20)
    parser.add_argument("--all-at-once", action="store_true")
    parser.add_argument("--repeats", type=int, default=2, help="every one with texts of its own")
    args = parser.parse_args()
    jobs = read_jobs(args.jobs)[: args.articles]
    # Repeats of the same texts would find all of them in the server's prefix cache.
    many = copies_of(jobs, args.copies * args.repeats)
    size = args.copies * len(jobs)
    print(
        f"{args.url}: {args.jobs.name} x{args.copies}, {num_questions(many[:size])} questions, "
        f"{args.in_flight} in flight"
    )
    for first in range(0, len(many), size):
        part = many[first : first + size]
        answers, wall = asyncio.run(
            run(args.url, args.model, part, args.in_flight, args.top, prefix_first=not args.all_at_once)
        )
        ordered = sorted(answers.latencies)
        print(
            f"{answers.questions / wall:9.1f} questions/s  {answers.tokens / wall:9.0f} prompt tokens/s as sent  "
            f"p50 {ordered[len(ordered) // 2] * 1e3:.0f} ms  found {answers.found} of {answers.options} options, "
            f"all of them in {answers.whole} of {answers.questions} questions"
        )


if __name__ == "__main__":
    main()
