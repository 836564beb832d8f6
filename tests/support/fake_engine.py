"""An engine without a model: a log-probability is a function of the path and the token, as the real one promises."""

import hashlib

import numpy as np

from spinf_serve.plan import ScorePlan, ScoreResult

FINGERPRINT = "fp_0123456789"


def fake_logprob(path: tuple[int, ...], token: int) -> float:
    """A number in [-9, -1), the same in every process."""
    digest = hashlib.blake2b(repr((path, token)).encode(), digest_size=8).digest()
    return float(np.float32(-1.0 - 8.0 * (int.from_bytes(digest) / 2**64)))


def paths_of(plan: ScorePlan) -> list[tuple[int, ...]]:
    """Every token's path from the root of its job, itself included."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(plan.tokens.tolist(), plan.parents.tolist(), strict=True):
        paths.append((*paths[parent], token) if parent >= 0 else (token,))
    return paths


def run_plan(plan: ScorePlan) -> ScoreResult:
    """The fake engine's answer to a plan."""
    paths, offsets = paths_of(plan), plan.col_offsets.tolist()
    values = [
        fake_logprob(paths[row], token)
        for r, row in enumerate(plan.read_rows.tolist())
        for token in plan.cols[offsets[r] : offsets[r + 1]].tolist()
    ]
    return ScoreResult(
        logprobs=np.array(values, np.float32),
        fingerprint=FINGERPRINT,
        packed_tokens=len(plan.tokens),
        passes=1,
        queue_ms=0.4,
        score_ms=12.6,
        busy_ms=11.0,
    )
