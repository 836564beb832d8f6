"""Puts contents and forests one after the other into a `ScorePlan`."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from spinf_serve.plan import I32, I64, ScorePlan
from spinf_serve.protocol.errors import RequestError
from workers.preprocess.encoder import Tokens
from workers.preprocess.layout import Reads
from workers.preprocess.trie import Forest

MAX_COLUMNS = 1 << 27
"""Numbers that one request may read: half a gigabyte of column ids, and as much again in the answer."""


@dataclass
class PlanBuilder:
    """Collects jobs in order; tokens and columns are counted on as they come. by_position: see `ScorePlan`."""

    by_position: bool = False
    _tokens: list[I32] = field(default_factory=list)
    _parents: list[I32] = field(default_factory=list)
    _rows: list[I32] = field(default_factory=list)
    _counts: list[I32] = field(default_factory=list)
    _cols: list[I32] = field(default_factory=list)
    _job_offsets: list[int] = field(default_factory=lambda: [0])
    _prefix_lens: list[int] = field(default_factory=list)
    _starts: list[I64] = field(default_factory=list)
    _gathers: list[I32] = field(default_factory=list)
    _width: int = 0

    @property
    def jobs(self) -> int:
        return len(self._prefix_lens)

    def add(self, prefix: Tokens, forest: Forest) -> None:
        """One content and what hangs under it. Without a prefix each first token of the forest begins a job."""
        start = self._job_offsets[-1]
        base = start + len(prefix)
        self._tokens += (np.array(prefix, np.int32), forest.tokens)
        parents = forest.parents + np.int32(base)
        if prefix:
            chain = np.arange(start - 1, base - 1, dtype=np.int32)
            chain[0] = -1
            self._parents.append(chain)
            self._job_offsets.append(base + len(forest.tokens))
            self._prefix_lens.append(len(prefix))
        else:
            roots = np.flatnonzero(forest.parents < 0)
            parents[roots] = -1
            self._job_offsets += [*(base + roots[1:]).tolist(), base + len(forest.tokens)]
            self._prefix_lens += [1] * len(roots)
        self._parents.append(parents)
        self._rows.append(forest.rows + np.int32(base))
        self._counts.append(forest.counts)
        self._cols.append(forest.cols)
        self._starts.append(forest.starts + self._width)
        self._gathers.append(forest.gathers)
        self._width += len(forest.cols)
        if self._width > MAX_COLUMNS:
            raise RequestError("request_too_large", f"the request reads more than {MAX_COLUMNS} probabilities")

    def reads(self) -> Reads:
        """The prompts added since the last call, in order."""
        reads = Reads(_concat(self._starts, np.int64), _concat(self._gathers, np.int32))
        self._starts, self._gathers = [], []
        return reads

    def plan(self) -> ScorePlan:
        counts = _concat(self._counts, np.int32)
        return ScorePlan(
            tokens=_concat(self._tokens, np.int32),
            parents=_concat(self._parents, np.int32),
            job_offsets=np.array(self._job_offsets, np.int64),
            prefix_lens=np.array(self._prefix_lens, np.int32),
            read_rows=_concat(self._rows, np.int32),
            col_offsets=np.concatenate(([0], np.cumsum(counts, dtype=np.int64))),
            cols=_concat(self._cols, np.int32),
            by_position=self.by_position,
        )


def _concat[D: np.generic](parts: Sequence[npt.NDArray[D]], dtype: type[D]) -> npt.NDArray[D]:
    return np.concatenate(parts) if parts else np.empty(0, dtype)
