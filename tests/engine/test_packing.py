"""Cutting plans into pieces and laying pieces into passes, without a model."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest

from spinf_serve.plan import ScorePlan
from tests.engine.support import Job, Question, make_plan, random_jobs
from workers.engine.kernels.tree_attention.segments import chains
from workers.engine.packing import JobTree, PackedPass, Piece, PlanCursor, Share, build_pass


def pieces(plan: ScorePlan, budget: int, max_tokens: int = 10_000) -> list[Piece]:
    """A lone plan's pieces, each as large as a pass of its own allows."""
    cursor = PlanCursor(plan, budget, max_tokens)
    out = []
    while not cursor.done:
        room = budget if cursor.next_cost() <= budget else max_tokens
        piece = cursor.take(room)
        assert piece is not None
        assert piece.tokens <= room
        out.append(piece)
    return out


def passes(plan: ScorePlan, budget: int) -> list[PackedPass]:
    return [build_pass([Share("key", plan, piece)]) for piece in pieces(plan, budget)]


@pytest.fixture
def plan() -> ScorePlan:
    return make_plan(random_jobs(31, 800, [50, 1, 120, 30], 8))[0]


def path_of(plan: ScorePlan, index: int) -> list[int]:
    """Token ids from the root to a token of the plan."""
    out = []
    while index >= 0:
        out.append(int(plan.tokens[index]))
        index = int(plan.parents[index])
    return out[::-1]


def paths_in_pass(packed: PackedPass, plan: ScorePlan) -> dict[int, list[int]]:
    """Row → the tokens on its path, from the segments and the rows; stored contents from the plan."""
    out = {}
    for chain in chains(packed.segments):
        tokens: list[int] = []
        for source, start, count in chain.path:
            if source == 0:
                tokens += packed.tokens[start : start + count].tolist()
            else:
                job = packed.stores[source - 1][1]
                first = int(plan.job_offsets[job]) + start
                tokens += plan.tokens[first : first + count].tolist()
        for i in range(chain.rows):
            out[chain.start + i] = tokens[: chain.position + i + 1]
    return out


@pytest.mark.parametrize("budget", [25, 60, 100, 200, 4000])
def test_every_row_has_its_plan_path(plan: ScorePlan, budget: int) -> None:
    for packed in passes(plan, budget):
        found = paths_in_pass(packed, plan)
        assert sorted(found) == list(range(len(packed.tokens)))
        for row, path in found.items():
            assert len(path) == packed.positions[row] + 1
        starts = np.diff(packed.share_entries)
        assert starts.sum() == len(packed.targets) == len(packed.entry_rows) == len(packed.entry_cols)


@pytest.mark.parametrize("budget", [25, 60, 100, 200, 4000])
def test_every_entry_is_read_once_on_its_own_path(plan: ScorePlan, budget: int) -> None:
    seen: list[int] = []
    for packed in passes(plan, budget):
        found = paths_in_pass(packed, plan)
        for row, col, target in zip(packed.entry_rows, packed.entry_cols, packed.targets, strict=True):
            read = int(np.searchsorted(plan.col_offsets, target, side="right")) - 1
            assert plan.cols[target] == col
            assert found[int(packed.read_rows[row])] == path_of(plan, int(plan.read_rows[read]))
        seen += packed.targets.tolist()
    assert sorted(seen) == list(range(len(plan.cols)))


def test_a_job_within_the_budget_is_one_piece_without_a_store(plan: ScorePlan) -> None:
    assert [(p.with_content, p.keep, len(p.replay)) for p in pieces(plan, 4000)] == [(True, False, 0)] * 4


def test_a_cut_job_keeps_its_content_and_reads_it_later() -> None:
    plan, _ = make_plan(random_jobs(32, 800, [100], 20))
    found = pieces(plan, 200)
    assert len(found) > 2
    assert [p.with_content for p in found] == [True] + [False] * (len(found) - 1)
    assert [p.keep for p in found] == [True] + [False] * (len(found) - 1)
    assert sum(p.last - p.first for p in found) == len(plan.tokens) - 100
    assert all(p.first == q.last for q, p in pairwise(found))


def test_replayed_tokens_are_the_ancestors() -> None:
    """A cut below a common beginning runs that beginning again, and no more."""
    stem = tuple(range(40, 50))
    job = Job((2, 30, 31), tuple(Question((*stem, 60 + i, 61, 62), ((70,),)) for i in range(10)))
    plan, _ = make_plan([job])
    second = pieces(plan, 30)[1]
    assert plan.tokens[second.replay].tolist() == list(stem)
    assert second.tokens == len(second.replay) + second.last - second.first


def test_content_over_the_budget_has_a_pass_to_itself() -> None:
    plan, _ = make_plan(random_jobs(33, 800, [100], 40))
    first = pieces(plan, 50, max_tokens=150)[0]
    assert first.with_content
    assert 100 < first.tokens <= 150


def test_content_that_just_fits_goes_before_its_branches() -> None:
    """Content within the budget, with its first question over it: the content alone, then the questions."""
    plan, _ = make_plan([Job((2, *range(30, 79)), (Question(tuple(range(100, 110)), ((50,),)),))])
    found = pieces(plan, 55)
    assert [(p.with_content, p.tokens) for p in found] == [(True, 50), (False, 10)]


def test_no_room_no_piece(plan: ScorePlan) -> None:
    cursor = PlanCursor(plan, 4000, 8000)
    least = cursor.next_cost()
    assert cursor.take(least - 1) is None
    assert cursor.take(least) is not None


def test_usable_tells_what_take_all_takes(plan: ScorePlan) -> None:
    for room in range(0, 500, 7):
        cursor = PlanCursor(plan, 4000, 8000)
        usable = cursor.usable(room)
        taken = cursor.take_all(room)
        assert usable == sum(p.tokens for p in taken) <= room
        assert len({p.job for p in taken}) == len(taken)


def test_reads_on_content_rows() -> None:
    plan, _ = make_plan([Job((2, 30, 31), (Question((), ((50,), (51, 52))),))])
    packed = build_pass([Share("key", plan, pieces(plan, 100)[0])])
    assert packed.read_rows.tolist() == [2, 3]
    assert packed.entry_cols.tolist() == plan.cols.tolist()


def test_a_job_without_branches() -> None:
    plan, _ = make_plan([Job((2, 30, 31), (Question((), ((50,),)),))])
    assert [(p.tokens, p.with_content, p.keep) for p in pieces(plan, 100)] == [(3, True, False)]


def test_chains_of_a_tree() -> None:
    job = Job((2, 30), (Question((40, 41), ((50,), (51, 52), (51, 53, 54))), Question((40, 60), ((50,),))))
    tree = JobTree(make_plan([job])[0], 0)
    assert tree.chain_starts.tolist() == [2, 6]  # 40 41 51 53, then 60
    assert tree.above == [0, 1]
    assert tree.ancestors(1).tolist() == [2]
    assert tree.cost(1, 1) == 2


def test_each_tree_keeps_its_request_s_way_to_be_summed(plan: ScorePlan) -> None:
    other = dataclasses.replace(plan, by_position=True)
    shares = [Share(name, p, piece) for name, p in (("a", plan), ("b", other)) for piece in pieces(p, 100)]
    packed = build_pass(shares)
    roots = packed.segments.parents < 0
    tree = np.cumsum(roots) - 1
    expected = [share.plan.by_position for share in shares]
    assert packed.segments.by_position is not None
    assert packed.segments.by_position.tolist() == [expected[i] for i in tree]
    assert any(share.piece.with_content for share in shares)
    assert any(not share.piece.with_content for share in shares)  # their contents are stores
