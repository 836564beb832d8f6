"""What a worker and the engine exchange: a request compiled to flat token arrays, and the arrays that answer it.

Letters: T tokens of the whole plan, J jobs, R read rows, C read columns over all rows.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ScorePlan:
    """The trees of one request, flat and unpadded.

    A job is one content (its prefix, `<bos>` included, a chain of at least one token) under which the filled templates
    and the lead-in tokens of multi-token options hang as a trie. A token attends to its ancestors and itself; its
    position is its depth. Jobs lie one after the other, each in depth-first order, so a parent stands before its
    children and a subtree is one run.

    tokens       [T] int32    token ids
    parents      [T] int32    index into `tokens` of the parent, −1 for the first token of a job
    job_offsets  [J+1] int64  job j is tokens[job_offsets[j]:job_offsets[j+1]]
    prefix_lens  [J] int32    the first prefix_lens[j] tokens of job j are its content chain
    read_rows    [R] int32    ascending indices into `tokens`: the rows whose next-token distribution is read
    col_offsets  [R+1] int64  row r reads the vocabulary ids cols[col_offsets[r]:col_offsets[r+1]]
    cols         [C] int32
    by_position  how a path is summed: False, content and branch each from their own start, so that many short branches
                 under one content are fast; True, by position alone, so that log P of a path has the same bits
                 wherever its content is said to end. A CPU sums by position either way
    """

    tokens: I32
    parents: I32
    job_offsets: I64
    prefix_lens: I32
    read_rows: I32
    col_offsets: I64
    cols: I32
    by_position: bool = False


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """What the engine returns for a plan: `logprobs[c]` = log P(cols[c] | path of its row), float32 [C].

    Times are milliseconds: `queue_ms` plan received → first pass, `score_ms` first pass → last result, `busy_ms` pass
    time × this request's share of the real tokens. `packed_tokens` counts the tokens that really ran, `passes` the
    passes that held any of them; `shared_pass` says whether one of those held another request too.
    """

    logprobs: F32
    fingerprint: str
    packed_tokens: int = 0
    passes: int = 0
    shared_pass: bool = False
    queue_ms: float = 0.0
    score_ms: float = 0.0
    busy_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts of a loaded engine, plain msgpack values. `fingerprint` is the public `system_fingerprint`."""

    fingerprint: str
    scheme: str
    batch_invariant: bool
    device_name: str
    compute_capability: str | None
    token_budget: int
    max_tokens: int
    vocab_size: int
    versions: dict[str, str | None] = field(default_factory=dict)  # torch, cuda, transformers, python, spinf_serve
    load_s: float = 0.0
    warmup_s: float = 0.0
    compiles: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished submission: exactly one of `result` and `error` is set.

    `error` is a `RequestError` (typed loosely here to keep this module free of imports).
    """

    key: Any
    result: ScoreResult | None = None
    error: Exception | None = None
