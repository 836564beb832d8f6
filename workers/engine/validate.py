"""The engine's own look at a plan: a fault of the sender fails that plan at the door, not the pass it would share."""

import numpy as np

from spinf_serve.plan import ScorePlan
from spinf_serve.protocol.errors import RequestError
from workers.engine.packing import JobTree


def check_plan(plan: ScorePlan, vocab_size: int, max_tokens: int) -> None:
    """RequestError `engine_error` for a malformed plan, `content_too_long` for a path over `max_tokens`."""
    fault = _fault(plan, vocab_size)
    if fault:
        raise RequestError("engine_error", f"the request was compiled to a malformed plan: {fault}")
    for job in range(len(plan.job_offsets) - 1):
        longest = _longest_path(plan, job, max_tokens)
        if longest > max_tokens:
            message = f"content and longest question have {longest} tokens, the limit is {max_tokens}"
            raise RequestError("content_too_long", message)


def _fault(plan: ScorePlan, vocab_size: int) -> str | None:
    """What is wrong with the arrays, or None."""
    tokens, offsets, reads = len(plan.tokens), plan.job_offsets, plan.read_rows
    if len(plan.parents) != tokens or len(offsets) < 1 or len(plan.prefix_lens) != len(offsets) - 1:
        return "array lengths differ"
    if offsets[0] != 0 or offsets[-1] != tokens or np.any(plan.prefix_lens < 1):
        return "job offsets do not cover the tokens"
    if np.any(np.diff(offsets) < plan.prefix_lens):
        return "a job is shorter than its content"
    if _outside(plan.tokens, vocab_size) or _outside(plan.cols, vocab_size):
        return "a token id is outside the vocabulary"
    if _outside(reads, tokens) or np.any(np.diff(reads) <= 0):
        return "read rows are not ascending token indices"
    columns = plan.col_offsets
    if (
        len(columns) != len(reads) + 1
        or columns[0] != 0
        or columns[-1] != len(plan.cols)
        or np.any(np.diff(columns) < 0)
    ):
        return "column offsets do not cover the columns"
    return _parent_fault(plan)


def _outside(ids: np.ndarray, size: int) -> bool:
    return len(ids) > 0 and not (int(ids.min()) >= 0 and int(ids.max()) < size)


def _parent_fault(plan: ScorePlan) -> str | None:
    starts = plan.job_offsets[:-1]
    index = np.arange(len(plan.tokens))
    first = np.repeat(starts, np.diff(plan.job_offsets))
    content = index < first + np.repeat(plan.prefix_lens, np.diff(plan.job_offsets))
    inside = index > first
    if np.any(plan.parents[starts] != -1) or np.any(plan.parents[inside] < first[inside]):
        return "a token's parent is outside its job"
    if np.any(plan.parents >= index) or np.any(plan.parents[content & inside] != index[content & inside] - 1):
        return "a token does not follow its parent"
    return None


def _longest_path(plan: ScorePlan, job: int, max_tokens: int) -> int:
    """Tokens of the job's longest path; the job's size where that is within the limit already."""
    size = int(plan.job_offsets[job + 1] - plan.job_offsets[job])
    if size <= max_tokens:
        return size
    tree = JobTree(plan, job)
    ends = [
        above + int(end - start)
        for above, start, end in zip(tree.above, tree.chain_starts, tree.chain_ends, strict=True)
    ]
    return tree.content_len + max(ends, default=0)
