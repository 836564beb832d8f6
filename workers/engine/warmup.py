"""The plans of the warm-up."""

import numpy as np

from spinf_serve.config import EngineConfig
from spinf_serve.plan import ScorePlan
from workers.engine.packing import PlanCursor, Share

WARMUP = object()
"""The key of the warm-up's shares."""

_BRANCH = 12  # tokens: a common question's length


def warmup_plan(tokens: int) -> ScorePlan:
    """One job of `tokens` tokens: half content, half questions of which each last token is read."""
    content = max(1, tokens // 2)
    index = np.arange(tokens, dtype=np.int32)
    parents = index - 1
    heads = np.arange(content, tokens, _BRANCH)
    parents[heads] = content - 1
    reads = np.append(heads[1:], tokens)[: len(heads)] - 1 if len(heads) else np.array([tokens - 1])
    return ScorePlan(
        tokens=np.zeros(tokens, dtype=np.int32),
        parents=parents,
        job_offsets=np.array([0, tokens], dtype=np.int64),
        prefix_lens=np.array([content], dtype=np.int32),
        read_rows=reads.astype(np.int32),
        col_offsets=np.arange(len(reads) + 1, dtype=np.int64),
        cols=np.zeros(len(reads), dtype=np.int32),
    )


def all_shares(plan: ScorePlan, config: EngineConfig) -> list[Share]:
    """The plan's pieces, each for a pass of its own."""
    cursor = PlanCursor(plan, config.token_budget, config.max_tokens)
    shares = []
    while (piece := cursor.take(max(config.token_budget, cursor.next_cost()))) is not None:
        shares.append(Share(WARMUP, plan, piece))
    return shares
