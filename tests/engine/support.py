"""What the engine's tests share: plans built from prompts, engines on tiny snapshots, and the reference's answers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spinf_serve.config import EngineConfig, ServedModel
from spinf_serve.plan import F32, Completion, ScorePlan, ScoreResult
from workers.engine.engine import ScoringEngine

BOUND = 1e-4
"""The one bound of models.md on log-probabilities, float32."""

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Question:
    """A prompt's own tokens after the content, and its options."""

    prompt: Tokens
    options: tuple[Tokens, ...]


@dataclass(frozen=True)
class Job:
    content: Tokens
    questions: tuple[Question, ...]


@dataclass
class _Node:
    token: int
    children: dict[int, "_Node"] = field(default_factory=dict)
    cols: list[int] = field(default_factory=list)


def _add(node: _Node, tokens: Sequence[int]) -> _Node:
    for token in tokens:
        node = node.children.setdefault(token, _Node(token))
    return node


def job_tree(job: Job) -> _Node:
    """The trie of a job below its content; the returned root stands for the content's last token."""
    root = _Node(job.content[-1])
    for question in job.questions:
        for option in question.options:
            for i, token in enumerate(option):
                cols = _add(root, (*question.prompt, *option[:i])).cols
                if token not in cols:
                    cols.append(token)
    return root


def make_plan(jobs: Sequence[Job]) -> tuple[ScorePlan, dict[tuple[int, Tokens, int], int]]:
    """The plan, and where (job, path below the content, token) is found in its `cols`."""
    tokens: list[int] = []
    parents: list[int] = []
    offsets, reads, col_offsets, cols = [0], [], [0], []
    where: dict[tuple[int, Tokens, int], int] = {}

    def visit(job: int, node: _Node, index: int, path: Tokens) -> None:
        if node.cols:
            reads.append(index)
            for col in node.cols:
                where[job, path, col] = len(cols)
                cols.append(col)
            col_offsets.append(len(cols))
        for child in node.children.values():
            tokens.append(child.token)
            parents.append(index)
            visit(job, child, len(tokens) - 1, (*path, child.token))

    for number, job in enumerate(jobs):
        start = len(tokens)
        tokens += job.content
        parents += [-1, *range(start, start + len(job.content) - 1)]
        visit(number, job_tree(job), len(tokens) - 1, ())
        offsets.append(len(tokens))
    plan = ScorePlan(
        tokens=np.array(tokens, np.int32),
        parents=np.array(parents, np.int32),
        job_offsets=np.array(offsets, np.int64),
        prefix_lens=np.array([len(job.content) for job in jobs], np.int32),
        read_rows=np.array(reads, np.int32),
        col_offsets=np.array(col_offsets, np.int64),
        cols=np.array(cols, np.int32),
    )
    return plan, where


def option_logprobs(
    jobs: Sequence[Job], logprobs: F32, where: dict[tuple[int, Tokens, int], int]
) -> dict[tuple[int, Tokens, Tokens], float]:
    """(job, prompt, option) → its log-probability by the chain rule."""
    out = {}
    for number, job in enumerate(jobs):
        for question in job.questions:
            for option in question.options:
                terms = [
                    float(logprobs[where[number, (*question.prompt, *option[:i]), token]])
                    for i, token in enumerate(option)
                ]
                out[number, question.prompt, option] = sum(terms)
    return out


def random_jobs(seed: int, vocab: int, contents: Sequence[int], questions: int, *, longest: int = 20) -> list[Job]:
    """Jobs with contents of the given lengths. Prompts share beginnings; options have 1 to 4 tokens, some nested."""
    rng = np.random.default_rng(seed)

    def draw(count: int) -> Tokens:
        return tuple(rng.integers(20, vocab, count).tolist())

    jobs = []
    for length in contents:
        stem = draw(3)
        made = []
        for _ in range(questions):
            prompt = (*stem[: rng.integers(0, 4)], *draw(int(rng.integers(1, longest))))
            base = draw(3)
            options = {draw(1), draw(1), base, base[:1], (*base[:2], *draw(1)), draw(4)}
            made.append(Question(prompt, tuple(sorted(options, key=lambda o: (len(o), o)))))
        jobs.append(Job((2, *draw(length - 1)), tuple(made)))
    return jobs


def engine_config(snapshot: Path, **settings: Any) -> EngineConfig:
    """An engine's settings for a local snapshot: two threads, no warm-up unless asked."""
    model = ServedModel(
        id="tiny", name="tiny", aliases=(), requested="tiny", family="gemma3", head="lm_head", capabilities=("score",),
        media=(), prompt_style="default", base_model="", revision="0" * 40, snapshot_dir=str(snapshot),
    )  # fmt: skip
    values = {"device": "cpu", "warmup": "none", "threads": 2, "token_budget": 4096, "max_tokens": 8192, **settings}
    return EngineConfig(model=model, **values)


def run_all(engine: ScoringEngine, plans: dict[Any, ScorePlan]) -> dict[Any, Completion]:
    """Submit every plan, step until all are done."""
    for key, plan in plans.items():
        engine.submit(key, plan)
    return {completion.key: completion for completion in drain(engine)}


def drain(engine: ScoringEngine) -> Iterator[Completion]:
    while engine.has_work:
        yield from engine.step()


def score(engine: ScoringEngine, plan: ScorePlan) -> ScoreResult:
    """One plan alone; raises its error."""
    completion = run_all(engine, {"only": plan})["only"]
    if completion.error is not None:
        raise completion.error
    assert completion.result is not None
    return completion.result


def load_reference(snapshot: Path) -> Any:
    """transformers' model on the same weights, float32, plain attention."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(snapshot, dtype=torch.float32, attn_implementation="eager").eval()


@torch.inference_mode()
def reference_logprobs(model: Any, jobs: Sequence[Job]) -> dict[tuple[int, Tokens, Tokens], float]:
    """Every option's log-probability from a plain forward over the full string.

    What comes after a token does not change its row: options that begin alike are read from the longest's forward.
    """
    out = {}
    for number, job in enumerate(jobs):
        for question in job.questions:
            rows: dict[Tokens, Tensor] = {}  # what is read of the option so far → log-probabilities of its next token
            for option in sorted(question.options, key=len, reverse=True):
                if option[:-1] not in rows:
                    ids = (*job.content, *question.prompt, *option[:-1])
                    logits = model(torch.tensor([ids]), logits_to_keep=len(option)).logits[0].double()
                    rows |= {option[:i]: row for i, row in enumerate(torch.log_softmax(logits, -1))}
                terms = [rows[option[:i]][token] for i, token in enumerate(option)]
                out[number, question.prompt, option] = float(sum(terms))
    return out


def worst_difference(ours: dict[Any, float], theirs: dict[Any, float]) -> float:
    """The largest difference over the same options."""
    assert ours.keys() == theirs.keys()
    return max(abs(ours[key] - theirs[key]) for key in theirs)


def summed(x: Tensor, weight: Tensor, *, backwards: bool = False) -> Tensor:
    """x [T, K] · weight [O, K]ᵀ in float32, the terms added one by one: an order that no library chooses."""
    terms = (x.float()[:, None] * weight.float()).unbind(-1)
    total = torch.zeros_like(terms[0])
    for term in terms[::-1] if backwards else terms:
        total += term
    return total
