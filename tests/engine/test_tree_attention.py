"""Tree attention: random forests against the row-by-row reference, and bits that depend on the path alone."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engine.test_kernels import BOUND, FIXED, FREE, draw, error, same_bits
from workers.engine.kernels.products import RowRule
from workers.engine.kernels.tree_attention import Segments, prepare, tree_attention
from workers.engine.kernels.tree_attention import reference as attention_reference
from workers.engine.kernels.tree_attention.groups import BLOCK, groups
from workers.engine.kernels.tree_attention.segments import chains

Rows = list[tuple[int, int, int, int]]


def make_segments(rows: Rows) -> Segments:
    """From (source, start, length, parent)."""
    columns = np.array(rows, dtype=np.int64).T
    return Segments(*columns)


@dataclass
class Case:
    """Inputs of the op: `kv_heads` key/value heads with `group` query heads each, of size `d`."""

    segments: Segments
    q: Tensor
    k: Tensor
    v: Tensor
    stores: list[tuple[Tensor, Tensor]]
    rows: int


def make_case(rows: Rows, *, kv_heads: int = 2, group: int = 2, d: int = 16, seed: int = 0) -> Case:
    segments = make_segments(rows)
    used = max((start + length for source, start, length, _ in rows if source == 0), default=0)
    t = FREE.padded(used)
    q, k, v = (
        draw(kv_heads, t, group, d, seed=seed),
        draw(kv_heads, t + 1, d, seed=seed + 1),
        draw(kv_heads, t + 1, d, seed=seed + 2),
    )
    k[:, t], v[:, t] = 0.0, 0.0
    lengths: dict[int, int] = {}
    for source, start, length, _ in rows:
        lengths[source] = max(lengths.get(source, 0), start + length)
    stores = [
        (
            draw(kv_heads, lengths.get(s, 1), d, seed=seed + 10 * s),
            draw(kv_heads, lengths.get(s, 1), d, seed=seed + 10 * s + 1),
        )
        for s in range(1, max(lengths) + 1)
    ]
    return Case(segments, q, k, v, stores, t)


def run(case: Case, window: int | None, rule: RowRule = FREE) -> Tensor:
    plan = prepare(case.segments, rows=case.rows, group=case.q.shape[2], windows=(window, None), rule=rule)
    return tree_attention(case.q, case.k, case.v, case.stores, plan, window=window, rule=rule)


def random_forest(seed: int, trees: int = 4, stored: bool = False) -> Rows:
    """Trees with contents of 1 to 200 rows (some in stores), branches of 1 to 90, up to four levels deep."""
    rng = np.random.default_rng(seed)
    out: Rows = []
    row = 0
    for tree in range(trees):
        length = int(rng.integers(1, 200))
        if stored and tree % 2:
            source = 1 + tree // 2
            first = int(rng.integers(0, length)) if length > 1 else 0
            out.append((source, 0, first + 1, -1))
            if first + 1 < length:
                out.append((source, first + 1, length - first - 1, len(out) - 1))
        else:
            out.append((0, row, length, -1))
            row += length
        roots = [len(out) - 1]
        for _ in range(int(rng.integers(1, 14))):
            parent = int(rng.choice(roots))
            length = int(rng.integers(1, 90)) if rng.random() < 0.2 else int(rng.integers(1, 12))
            out.append((0, row, length, parent))
            row += length
            if len(roots) < 5:
                roots.append(len(out) - 1)
    return out


WINDOWS = [None, 1, 5, 64, 100]


@pytest.mark.parametrize("rule", [FREE, FIXED], ids=["free", "fixed"])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("stored", [False, True], ids=["pass", "stores"])
def test_random_forests_equal_the_reference(window: int | None, stored: bool, rule: RowRule) -> None:
    case = make_case(random_forest(7, stored=stored))
    if rule is FIXED:
        case.rows = FIXED.padded(case.rows)
    theirs = attention_reference.tree_attention(case.q, case.k, case.v, case.stores, case.segments, window=window)
    if rule is FIXED:
        pad = case.rows - case.q.shape[1]
        case.q = torch.nn.functional.pad(case.q, (0, 0, 0, 0, 0, pad))
        case.k, case.v = (torch.nn.functional.pad(x, (0, 0, 0, pad)) for x in (case.k, case.v))
        theirs = torch.nn.functional.pad(theirs, (0, 0, 0, pad))
    assert error(run(case, window, rule), theirs) < BOUND


@pytest.mark.parametrize("heads", [(1, 4, 256), (1, 3, 24), (4, 1, 32), (2, 5, 8)], ids=str)
def test_head_layouts_equal_the_reference(heads: tuple[int, int, int]) -> None:
    kv_heads, group, d = heads
    case = make_case(random_forest(8), kv_heads=kv_heads, group=group, d=d)
    theirs = attention_reference.tree_attention(case.q, case.k, case.v, [], case.segments, window=33)
    assert error(run(case, 33), theirs) < BOUND


def one_path(lengths: list[int], row: int = 0, source: int = 0) -> Rows:
    """A path in segments of these lengths."""
    out: Rows = []
    for i, length in enumerate(lengths):
        out.append((source, row, length, i - 1))
        row += length
    return out


def path_case(rows: Rows, at: list[tuple[int, int]], length: int = 150) -> Case:
    """A case in which path position p of one fixed path lies at rows `at` = (source, first row) of consecutive pieces.

    The fixed path's q, k and v are written over whatever the case drew.
    """
    case = make_case(rows, seed=50)
    q, k, v = draw(2, length, 2, 16, seed=90), draw(2, length, 16, seed=91), draw(2, length, 16, seed=92)
    position = 0
    for source, first, count in ((s, f, c) for (s, f), c in zip(at, _counts(rows, at, length), strict=True)):
        piece = slice(position, position + count)
        into_k, into_v = (case.k, case.v) if source == 0 else case.stores[source - 1]
        into_k[:, first : first + count], into_v[:, first : first + count] = k[:, piece], v[:, piece]
        if source == 0:
            case.q[:, first : first + count] = q[:, piece]
        position += count
    assert position == length
    return case


def _counts(rows: Rows, at: list[tuple[int, int]], length: int) -> list[int]:
    by_start = {(source, start): count for source, start, count, _ in rows}
    counts = [by_start[piece] for piece in at]
    assert sum(counts) == length
    return counts


def _shapes() -> dict[str, tuple[Rows, list[tuple[int, int]]]]:
    """Ways to hold one path of 150 positions, whose last 30 rows are compared."""
    branches = [(0, 150 + 7 * i, 7, 0) for i in range(9)]
    return {
        "alone": (one_path([150]), [(0, 0)]),
        "cut once": (one_path([120, 30]), [(0, 0), (0, 120)]),
        "cut often": (one_path([1, 62, 1, 1, 55, 30]), [(0, 0), (0, 1), (0, 63), (0, 64), (0, 65), (0, 120)]),
        "behind another tree": ([(0, 0, 61, -1), (0, 61, 120, -1), (0, 181, 30, 1)], [(0, 61), (0, 181)]),
        "rows apart": ([(0, 0, 120, -1), (0, 120, 33, 0), (0, 153, 30, 0)], [(0, 0), (0, 153)]),
        "with branches": ([(0, 0, 120, -1), (0, 120, 30, 0), *branches], [(0, 0), (0, 120)]),
        "content in a store": ([(1, 0, 120, -1), (0, 0, 30, 0)], [(1, 0), (0, 0)]),
        "content in a store, cut": ([(1, 0, 50, -1), (1, 50, 70, 0), (0, 0, 30, 1)], [(1, 0), (1, 50), (0, 0)]),
        "two stores": ([(1, 0, 70, -1), (2, 0, 50, 0), (0, 5, 30, 1), (0, 0, 5, 1)], [(1, 0), (2, 0), (0, 5)]),
        "store and pass": ([(1, 0, 70, -1), (0, 0, 50, 0), (0, 50, 30, 1)], [(1, 0), (0, 0), (0, 50)]),
        "single rows at the end": (
            [(0, 0, 120, -1), *[(0, 120 + i, 1, i) for i in range(30)]],
            [(0, 0), *[(0, 120 + i) for i in range(30)]],
        ),
    }


@pytest.mark.parametrize("window", [None, 40, 100])
@pytest.mark.parametrize("name", list(_shapes())[1:])
def test_bits_depend_on_the_path_alone(name: str, window: int | None) -> None:
    def last_rows(shape: str) -> Tensor:
        rows, at = _shapes()[shape]
        out = run(path_case(rows, at), window)
        tail: list[int] = []
        for (source, first), count in zip(at, _counts(rows, at, 150), strict=True):
            tail += range(first, first + count) if source == 0 else []
        return out[tail[-30:]]

    assert same_bits(last_rows(name), last_rows("alone"))


@pytest.mark.parametrize("window", [None, 1100])
def test_bits_of_long_paths(window: int | None) -> None:
    """Past a thousand keys a library sums in stages; where a row's first visible block lies must not move them."""
    alone = path_case(one_path([1400]), [(0, 0)], 1400)
    cut = path_case([(1, 0, 1370, -1), (0, 0, 30, 0)], [(1, 0), (0, 0)], 1400)
    assert same_bits(run(cut, window)[:30], run(alone, window)[1370:1400])


def test_another_tree_of_nan_and_infinity_changes_nothing() -> None:
    rows = [(0, 0, 61, -1), (0, 61, 120, -1), (0, 181, 30, 1)]
    case = path_case(rows, [(0, 61), (0, 181)])
    before = run(case, 40)
    case.q[:, :61], case.k[:, :61], case.v[:, :61] = float("nan"), float("inf"), float("nan")
    assert same_bits(run(case, 40)[61:211], before[61:211])
    assert run(case, 40)[:61].isnan().all()


def test_rows_of_no_segment_are_zero() -> None:
    case = make_case([(0, 0, 20, -1)])
    assert not run(case, None)[20:].any()


def test_every_row_is_in_one_group() -> None:
    segments = make_segments(random_forest(9, trees=9))
    rows = np.concatenate([np.unique(g.rows) for g in groups(segments, group=2, multiple=16)])
    total = int(segments.lengths[segments.sources == 0].sum())
    assert sorted(rows.tolist()) == list(range(total))


def test_many_short_branches_share_one_group() -> None:
    """The content's blocks are read in place once for all of them: not gathered per branch, no group each."""
    rows: Rows = [(0, 0, 200, -1), *[(0, 200 + 5 * i, 5, 0) for i in range(40)]]
    found = [g for g in groups(make_segments(rows), group=4, multiple=16) if g.rows.min() >= 200]
    assert [len(g.tails) for g in found] == [39]  # the first branch continues the content's rows: one chain with them
    assert all(g.first_tail == 200 // BLOCK and g.shared == (((0, 0, 192),),) for g in found)


def test_a_question_asked_in_many_ways_is_shared_past_the_content() -> None:
    """Lead-ins below a long question take the question's whole blocks from their group too."""
    rows: Rows = [(0, 0, 100, -1), (0, 100, 150, 0), *[(0, 250 + 2 * i, 2, 1) for i in range(20)]]
    found = [g for g in groups(make_segments(rows), group=4, multiple=16) if g.rows.min() >= 252]
    assert {g.first_tail for g in found} == {250 // BLOCK}


def test_chains_follow_first_children() -> None:
    segments = make_segments([(0, 0, 10, -1), (0, 10, 3, 0), (0, 13, 4, 1), (0, 17, 2, 1), (0, 19, 5, 0)])
    assert [(c.start, c.rows, c.position) for c in chains(segments)] == [(0, 17, 0), (17, 2, 13), (19, 5, 10)]
