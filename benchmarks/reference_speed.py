"""transformers on the questions of a plan: the content's keys and values cached, one question at a time."""

import time
from dataclasses import dataclass
from pathlib import Path

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


class CachedReference:
    """A transformers model that answers questions one by one over a cached content."""

    def __init__(self, snapshot: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(snapshot, dtype=torch.float32).eval()

    @torch.inference_mode()
    def compare(self, contents: list[ContentQuestions], logprobs: np.ndarray) -> tuple[float, int, float]:
        """Run everything; returns the largest difference from `logprobs`, the number of questions, and the seconds."""
        from transformers import DynamicCache

        worst, count, seconds = 0.0, 0, 0.0
        for content in contents:
            started = time.perf_counter()
            cache = DynamicCache()
            self.model(torch.tensor([content.content]), past_key_values=cache, logits_to_keep=1)
            seconds += time.perf_counter() - started
            for question in content.questions:
                started = time.perf_counter()
                entries = [entry for entry in question.entries if entry[0] >= 0]
                depths = sorted({depth for depth, _, _ in entries})
                out = self.model(
                    torch.tensor([question.tokens]), past_key_values=cache, logits_to_keep=torch.tensor(depths)
                )
                rows = torch.log_softmax(out.logits[0], dim=-1)
                values = rows[[depths.index(d) for d, _, _ in entries], [c for _, c, _ in entries]].numpy()
                cache.crop(len(content.content))
                seconds += time.perf_counter() - started
                count += 1
                worst = max(worst, float(np.abs(values - logprobs[[i for _, _, i in entries]]).max()))
        return worst, count, seconds
