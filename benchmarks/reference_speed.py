"""transformers on the questions of a plan: the content's keys and values cached, one question at a time."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spinf_serve.plan import ScorePlan


@dataclass(frozen=True)
class Question:
    """A path below the content and the entries read on it: (index on the path, vocabulary id, index in `cols`).

    Index -1 is the content's last token.
    """

    tokens: list[int]
    entries: list[tuple[int, int, int]]


@dataclass(frozen=True)
class ContentQuestions:
    content: list[int]
    questions: list[Question]


def paths(plan: ScorePlan, most: int) -> list[ContentQuestions]:
    """Per job the content and up to `most` of its questions, evenly spread. A question is a read row that no longer
    question runs through; the reads above it belong to it too.
    """
    out = []
    for job in range(len(plan.job_offsets) - 1):
        start, end = plan.job_offsets[job], plan.job_offsets[job + 1]
        content_end = int(start + plan.prefix_lens[job])
        reads = [i for i, row in enumerate(plan.read_rows) if start <= row < end]
        inner = set()
        chains = {}
        for i in reads:
            chain = _chain(plan, int(plan.read_rows[i]), content_end)
            chains[i] = chain
            inner.update(chain[:-1])
        leaves = [i for i in reads if int(plan.read_rows[i]) not in inner]
        step = max(1, -(-len(leaves) // most))
        questions = [_question(plan, chains[i], content_end) for i in leaves[::step]]
        out.append(ContentQuestions(plan.tokens[start:content_end].tolist(), questions))
    return out


def _chain(plan: ScorePlan, row: int, content_end: int) -> list[int]:
    """Plan indices from below the content to `row`."""
    chain = []
    while row >= content_end:
        chain.append(row)
        row = int(plan.parents[row])
    return chain[::-1]


def _question(plan: ScorePlan, chain: list[int], content_end: int) -> Question:
    entries = []
    for depth, row in enumerate([content_end - 1, *chain], start=-1):
        at = int(np.searchsorted(plan.read_rows, row))
        if at < len(plan.read_rows) and plan.read_rows[at] == row:
            columns = range(int(plan.col_offsets[at]), int(plan.col_offsets[at + 1]))
            entries += [(depth, int(plan.cols[c]), c) for c in columns]
    return Question(plan.tokens[chain].tolist(), entries)


@dataclass(frozen=True)
class ReferenceRun:
    """What a reference answered, index in the plan's cols → log-probability, to how many questions in which time."""

    values: dict[int, float]
    questions: int
    seconds: float


class CachedReference:
    """A transformers model that answers questions one by one over a cached content."""

    def __init__(self, snapshot: Path, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(snapshot, dtype=dtype).eval()

    @torch.inference_mode()
    def run(self, contents: list[ContentQuestions]) -> ReferenceRun:
        """All questions of all contents."""
        from transformers import DynamicCache

        values: dict[int, float] = {}
        started = time.perf_counter()
        for content in contents:
            cache = DynamicCache()
            self.model(torch.tensor([content.content]), past_key_values=cache, logits_to_keep=1)
            for question in content.questions:
                values |= self._answer(question, cache)
                cache.crop(len(content.content))
        return ReferenceRun(values, sum(len(c.questions) for c in contents), time.perf_counter() - started)

    def _answer(self, question: Question, cache: Any) -> dict[int, float]:
        entries = [entry for entry in question.entries if entry[0] >= 0]
        depths = sorted({depth for depth, _, _ in entries})
        tokens = torch.tensor([question.tokens])
        out = self.model(tokens, past_key_values=cache, logits_to_keep=torch.tensor(depths))
        rows = torch.log_softmax(out.logits[0].float(), dim=-1)
        found = rows[[depths.index(d) for d, _, _ in entries], [c for _, c, _ in entries]]
        return dict(zip((i for _, _, i in entries), found.tolist(), strict=True))
