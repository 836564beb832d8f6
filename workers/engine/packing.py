"""Cuts plans into pieces and lays pieces back to back into one pass. No torch.

A piece is what one job gives to one pass: its content, or the content's stored keys and values, and a run of its
branches. Branches are cut where a new chain starts; the tokens between the content and the run's first chain are run
again (their bits are the same), so a cut costs at most one question's length.
"""

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np

from spinf_serve.plan import I32, I64, ScorePlan
from workers.engine.kernels.tree_attention.segments import Segments


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of job `job`.

    with_content  the content's tokens run in this pass; otherwise its keys and values come from the job's store
    keep          the content's keys and values are stored: branches of later passes read them
    replay        [·] plan indices of tokens above `first` that run again
    first, last   plan indices of the branch tokens first ≤ i < last
    """

    job: int
    with_content: bool
    keep: bool
    replay: I64
    first: int
    last: int
    tokens: int


class JobTree:
    """The shape of one job: its chains and how deep they hang."""

    def __init__(self, plan: ScorePlan, job: int) -> None:
        self.job = job
        self.start, self.end = int(plan.job_offsets[job]), int(plan.job_offsets[job + 1])
        self.content_end = self.start + int(plan.prefix_lens[job])
        self.parents = plan.parents
        index = np.arange(self.content_end, self.end)
        new_chain = plan.parents[self.content_end : self.end] != index - 1
        if len(new_chain):
            new_chain[0] = True
        self.chain_starts: I64 = index[new_chain].astype(np.int64)
        self.chain_ends: I64 = np.append(self.chain_starts[1:], self.end).astype(np.int64)[: len(self.chain_starts)]
        self.above = self._above()

    @property
    def content_len(self) -> int:
        return self.content_end - self.start

    def _above(self) -> list[int]:
        """Per chain: how many branch tokens stand above its first token, below the content."""
        starts, above = self.chain_starts.tolist(), []
        for i, parent in enumerate(self.parents[self.chain_starts].tolist()):
            if parent < self.content_end:
                above.append(0)
                continue
            at = bisect_right(starts, parent, 0, i + 1) - 1
            above.append(above[at] + parent - starts[at] + 1)
        return above

    def ancestors(self, chain: int) -> I64:
        """Plan indices of the branch tokens above the chain, from the content down."""
        out: list[int] = []
        token = int(self.parents[self.chain_starts[chain]])
        while token >= self.content_end:
            out.append(token)
            token = int(self.parents[token])
        return np.array(out[::-1], dtype=np.int64)

    def cost(self, chain: int, last_chain: int) -> int:
        """Tokens of the chains chain … last_chain with what must run again above them."""
        return self.above[chain] + int(self.chain_ends[last_chain] - self.chain_starts[chain])

    def chains_within(self, chain: int, room: int) -> int:
        """How many chains from `chain` on fit in `room` tokens."""
        limit = int(self.chain_starts[chain]) + room - self.above[chain]
        return max(0, int(np.searchsorted(self.chain_ends, limit, side="right")) - chain)


class PlanCursor:
    """What of a plan has not been given to a pass yet."""

    def __init__(self, plan: ScorePlan, budget: int, max_tokens: int) -> None:
        """budget: tokens of a pass. max_tokens: tokens of a pass that a content over the budget has to itself."""
        self.plan, self.budget, self.max_tokens = plan, budget, max_tokens
        self.num_jobs = len(plan.job_offsets) - 1
        self.tokens_left = len(plan.tokens)
        self._trees: dict[int, JobTree] = {}  # shared with the copies that `usable` makes
        self._job = 0
        self._chain = 0
        self._content_done = False

    @property
    def done(self) -> bool:
        return self._job == self.num_jobs

    @property
    def _tree(self) -> JobTree | None:
        if self.done:
            return None
        if self._job not in self._trees:
            self._trees[self._job] = JobTree(self.plan, self._job)
        return self._trees[self._job]

    def take_all(self, room: int) -> list[Piece]:
        """The next pieces, one of each job at most, that together fit in `room` tokens."""
        pieces: list[Piece] = []
        while (piece := self.take(room)) is not None:
            pieces.append(piece)
            room -= piece.tokens
            if self._content_done:  # the job was cut for want of room: its rest belongs to another pass
                break
        return pieces

    def usable(self, room: int) -> int:
        """How many of `room` tokens `take_all` would use."""
        return sum(piece.tokens for piece in copy(self).take_all(room))

    def next_cost(self) -> int:
        """Tokens of the smallest piece that can be taken next; over the budget: it needs a pass to itself."""
        tree = self._tree
        if tree is None:
            return 0
        if self._content_done:
            return tree.cost(self._chain, self._chain)
        with_chain = tree.content_len + (tree.cost(0, 0) if len(tree.chain_starts) else 0)
        return with_chain if with_chain <= self.budget else tree.content_len

    def take(self, room: int) -> Piece | None:
        """The next piece, of as many branches as fit in `room` tokens; None when even the smallest does not fit."""
        tree = self._tree
        if tree is None or self.next_cost() > room:
            return None
        content = 0 if self._content_done else tree.content_len
        total = len(tree.chain_starts)
        count = tree.chains_within(self._chain, room - content) if self._chain < total else 0
        return self._cut(tree, content, count)

    def _cut(self, tree: JobTree, content: int, count: int) -> Piece:
        first = last = tree.end
        replay, tokens = np.zeros(0, dtype=np.int64), content
        if count:
            end = self._chain + count - 1
            first, last = int(tree.chain_starts[self._chain]), int(tree.chain_ends[end])
            replay = tree.ancestors(self._chain)
            tokens += tree.cost(self._chain, end)
        elif self._chain < len(tree.chain_starts):
            first = last = int(tree.chain_starts[self._chain])
        finished = self._chain + count == len(tree.chain_starts)
        piece = Piece(tree.job, content > 0, content > 0 and not finished, replay, first, last, tokens)
        self.tokens_left -= content + last - first
        self._advance(count, finished)
        return piece

    def _advance(self, count: int, finished: bool) -> None:
        self._chain, self._content_done = self._chain + count, True
        if finished:
            self._job, self._chain, self._content_done = self._job + 1, 0, False


@dataclass(frozen=True, slots=True)
class Share:
    """One piece in a pass and the request it belongs to."""

    key: Hashable
    plan: ScorePlan
    piece: Piece


@dataclass(frozen=True, slots=True)
class ContentRows:
    """Where the content of a job stands that a store is to keep."""

    key: Hashable
    job: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class PackedPass:
    """Shares back to back, as arrays. T real tokens, R rows read, C entries.

    tokens, positions       [T]
    segments                the trees; source s > 0 is stores[s - 1]
    stores                  (key, job) of every stored content that is read
    captures                contents of this pass that are to be stored
    read_rows               [R] rows of the pass
    entry_rows, entry_cols  [C] index into read_rows, vocabulary id
    share_entries           [shares + 1] share i has the entries share_entries[i] … share_entries[i + 1] - 1
    targets                 [C] where each entry goes in its plan's `cols`
    """

    shares: tuple[Share, ...]
    tokens: I32
    positions: I64
    segments: Segments
    stores: tuple[tuple[Hashable, int], ...]
    captures: tuple[ContentRows, ...]
    read_rows: I64
    entry_rows: I64
    entry_cols: I32
    share_entries: I64
    targets: I64


def _piece_rows(plan: ScorePlan, piece: Piece) -> tuple[I64, int]:
    """Plan indices of the piece's tokens in the order of the pass, and how many of them are the content."""
    start = int(plan.job_offsets[piece.job])
    content = int(plan.prefix_lens[piece.job]) if piece.with_content else 0
    branch = np.arange(piece.first, piece.last, dtype=np.int64)
    return np.concatenate((np.arange(start, start + content, dtype=np.int64), piece.replay, branch)), content


class _Builder:
    """Collects the arrays of a pass share by share."""

    def __init__(self) -> None:
        self.rows = 0
        self.reads = 0
        self.entries = 0
        self.tokens: list[I32] = []
        self.positions: list[I64] = []
        self.segments: list[tuple[int, int, int, int, bool, bool]] = []
        self.stores: list[tuple[Hashable, int]] = []
        self.captures: list[ContentRows] = []
        self.read_rows: list[I64] = []
        self.entry_rows: list[I64] = []
        self.targets: list[I64] = []
        self.entry_cols: list[I32] = []

    def add(self, share: Share) -> None:
        """Append one share."""
        plan, piece = share.plan, share.piece
        index, content = _piece_rows(plan, piece)
        roots = self._store_segments(share, plan.parents[index]) if not content else {}
        self._add_tree(plan, index, content, roots)
        if piece.keep:
            self.captures.append(ContentRows(share.key, piece.job, self.rows, content))
        self._add_reads(plan, index, len(index) - (piece.last - piece.first), content)
        self.tokens.append(plan.tokens[index])
        self.rows += len(index)

    def _store_segments(self, share: Share, parents: I32) -> dict[int, int]:
        """The stored content as segments, cut where branches hang; returns plan index of a content token → segment."""
        plan, job = share.plan, share.piece.job
        start, length = int(plan.job_offsets[job]), int(plan.prefix_lens[job])
        self.stores.append((share.key, job))
        hung = parents[(parents >= start) & (parents < start + length)]
        out: dict[int, int] = {}
        first, parent = 0, -1
        for end in np.unique(hung).tolist():
            self.segments.append((len(self.stores), first, end + 1 - start - first, parent, True, plan.by_position))
            parent = len(self.segments) - 1
            out[end] = parent
            first = end + 1 - start
        return out

    def _add_tree(self, plan: ScorePlan, index: I64, content: int, segment_at: dict[int, int]) -> None:
        """Segments and positions of the piece's rows, the first `content` of them the content's.

        segment_at  plan index → segment that ends there
        """
        parents = plan.parents[index].astype(np.int64)
        follows = np.zeros(len(index), dtype=bool)
        follows[1:] = parents[1:] == index[:-1]
        hung_on, counts = np.unique(parents, return_counts=True)
        forks = hung_on[(counts > 1) & (hung_on >= 0)]
        follows &= ~np.isin(parents, forks)
        follows[content : content + 1] = False
        starts = np.flatnonzero(~follows)
        ends = np.append(starts[1:], len(index))[: len(starts)]
        depth_at = {at: self._end_depth(segment) for at, segment in segment_at.items()}
        depths = []
        runs = zip(starts.tolist(), ends.tolist(), parents[starts].tolist(), index[ends - 1].tolist(), strict=True)
        for start, end, parent, last in runs:
            depth = depth_at[parent] if parent >= 0 else 0
            on = segment_at[parent] if parent >= 0 else -1
            self.segments.append((0, self.rows + start, end - start, on, start < content, plan.by_position))
            depths.append(depth)
            segment_at[last], depth_at[last] = len(self.segments) - 1, depth + end - start
        shifts = np.array(depths, dtype=np.int64) - starts
        self.positions.append(np.repeat(shifts, ends - starts) + np.arange(len(index)))

    def _end_depth(self, segment: int) -> int:
        """Path length at the end of a store's segment."""
        _, start, length, *_ = self.segments[segment]
        return start + length

    def _add_reads(self, plan: ScorePlan, index: I64, branch_row: int, content: int) -> None:
        """The rows read among the content's and the branch's own tokens; replayed tokens were read before."""
        for rows, offset in ((index[:content], 0), (index[branch_row:], branch_row)):
            if not len(rows):
                continue
            low, high = np.searchsorted(plan.read_rows, (rows[0], rows[-1] + 1))
            entries = plan.col_offsets[low : high + 1]
            self.read_rows.append(plan.read_rows[low:high].astype(np.int64) - rows[0] + offset + self.rows)
            self.entry_rows.append(np.repeat(np.arange(self.reads, self.reads + high - low), np.diff(entries)))
            self.entry_cols.append(plan.cols[entries[0] : entries[-1]])
            self.targets.append(np.arange(entries[0], entries[-1], dtype=np.int64))
            self.reads += int(high - low)
            self.entries += int(entries[-1] - entries[0])


def build_pass(shares: Sequence[Share]) -> PackedPass:
    """The pass of these shares, in their order."""
    builder = _Builder()
    share_entries = [0]
    for share in shares:
        builder.add(share)
        share_entries.append(builder.entries)
    sources, starts, lengths, parents, *flags = np.array(builder.segments, dtype=np.int64).reshape(-1, 6).T
    content, by_position = (flag.astype(bool) for flag in flags)
    return PackedPass(
        shares=tuple(shares),
        tokens=np.concatenate(builder.tokens),
        positions=np.concatenate(builder.positions),
        segments=Segments(sources, starts, lengths, parents, content, by_position),
        stores=tuple(builder.stores),
        captures=tuple(builder.captures),
        read_rows=np.concatenate(builder.read_rows).astype(np.int64),
        entry_rows=np.concatenate(builder.entry_rows).astype(np.int64),
        entry_cols=np.concatenate(builder.entry_cols),
        share_entries=np.array(share_entries, dtype=np.int64),
        targets=np.concatenate(builder.targets),
    )
