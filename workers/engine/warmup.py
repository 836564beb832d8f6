"""The plan of the warm-up."""

import numpy as np

from spinf_serve.config import EngineConfig
from spinf_serve.plan import ScorePlan
from workers.engine.packing import PlanCursor, Share

_TOKENS = 256
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


def warmup_share(config: EngineConfig) -> Share:
    """The warm-up's one piece, within the budget."""
    plan = warmup_plan(min(_TOKENS, config.token_budget))
    piece = PlanCursor(plan, config.token_budget, config.max_tokens).take(config.token_budget)
    assert piece is not None
    return Share("warm-up", plan, piece)
