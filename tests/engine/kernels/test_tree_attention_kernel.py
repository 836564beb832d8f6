"""The attention kernel, interpreted: against the row-by-row reference, what it may not see, and its work list.

That a row keeps its bits in any company is shown on the card (tests/gpu): numpy sums in orders of its own.
"""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engine.test_tree_attention import Case, Rows, make_case, make_segments, random_forest
from tests.support.attention import Heads, attend
from tests.support.triton_interpreter import has_device
from workers.engine.kernels.encoding import Codes, Encoding
from workers.engine.kernels.tree_attention import Segments, reference, tiles
from workers.engine.kernels.tree_attention.path_blocks import PathPlan, plan_paths
from workers.engine.kernels.tree_attention.segments import chains, cut
from workers.engine.kernels.tree_attention.tiles import SPAN, Paths, TilePlan, paths, plan_tiles

BOUND = 2e-5  # float32 sums of some 300 products and exponentials of values up to 5
interpreted = pytest.mark.skipif(has_device(), reason="tests/gpu covers the compiled kernel")


def heads(case: Case) -> Heads:
    """The case in the kernel's layout."""
    n, t, g, d = case.q.shape
    stores = [(k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()) for k, v in case.stores]
    q = case.q.permute(1, 0, 2, 3).reshape(t, n * g, d).contiguous()
    return Heads(q, *(a[:, :t].transpose(0, 1).contiguous() for a in (case.k, case.v)), stores)


def run(case: Case, window: int | None) -> Tensor:
    out = attend(case.segments, heads(case), window)
    assert isinstance(out, Tensor)
    return out


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def branches(content: int, lengths: list[int], at: int = 0) -> Rows:
    """A content of some rows, from row `at` on, with branches of these lengths."""
    rows: Rows = [(0, at, content, -1)]
    row = at + content
    for length in lengths:
        rows.append((0, row, length, 0))
        row += length
    return rows


@interpreted
@pytest.mark.parametrize(
    ("kv_heads", "group", "d", "window", "stored"),
    [(2, 2, 16, None, False), (1, 4, 48, 16, True), (1, 3, 32, 100, False), (1, 1, 16, None, True)],
)
def test_random_forests(kv_heads: int, group: int, d: int, window: int | None, stored: bool) -> None:
    case = make_case(random_forest(group, trees=2, stored=stored), kv_heads=kv_heads, group=group, d=d)
    expected = reference.tree_attention(case.q, case.k, case.v, case.stores, case.segments, window=window)
    out = run(case, window)
    assert out.isfinite().all()  # stores' rows and fresh memory hold NaN
    assert float((out - expected).abs().max()) < BOUND


@interpreted
def test_wide_heads_take_smaller_key_tiles() -> None:
    case = make_case(branches(40, [20, 7]), kv_heads=1, group=16, d=512)
    expected = reference.tree_attention(case.q, case.k, case.v, case.stores, case.segments, window=None)
    assert float((run(case, None) - expected).abs().max()) < 2 * BOUND  # sums over twice the width


@interpreted
def test_codes_are_the_rounded_result() -> None:
    case = make_case(random_forest(7, trees=2))
    scale = torch.tensor([0.03125])
    codes = attend(case.segments, heads(case), None, encoding=Encoding("fp8_static", torch.float8_e4m3fn, scale))
    assert isinstance(codes, Codes)
    expected = (run(case, None) / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert same_bits(codes.values, expected)


@interpreted
def test_a_stored_content_gives_the_bits_of_one_in_the_pass() -> None:
    together = make_case(branches(70, [12, 5, 30]), d=16)
    x = heads(together)
    expected = attend(together.segments, x, 64)[70:117]
    rows: Rows = [(1, 0, 70, -1), (0, 0, 12, 0), (0, 12, 5, 0), (0, 17, 30, 0)]
    stored = Heads(x.q[70:118].contiguous(), x.k[70:118].contiguous(), x.v[70:118].contiguous(), [(x.k[:70], x.v[:70])])
    out = attend(make_segments(rows), stored, 64)
    assert isinstance(out, Tensor)
    assert same_bits(out[:47], expected)


@interpreted
def test_another_tree_full_of_nan_touches_nothing() -> None:
    rows = branches(30, [6, 7])
    alone = make_case(rows, d=16)
    x = heads(alone)
    expected = attend(alone.segments, x, None)[:43]
    both = make_segments([*rows, (0, 43, 20, -1), (0, 63, 5, 3)])
    packed = Heads(*(torch.full((80, *a.shape[1:]), float("nan")) for a in (x.q, x.k, x.v)))
    for whole, part in zip((packed.q, packed.k, packed.v), (x.q, x.k, x.v), strict=True):
        whole[:43] = part[:43]
    out = attend(both, packed, None)
    assert isinstance(out, Tensor)
    assert same_bits(out[:43], expected)


@interpreted
def test_scores_that_are_all_infinite_show() -> None:
    """Every weight of such a row is zero, as those of padding are; but padding is zeros, and the row no number."""
    case = make_case(branches(3, [2]), d=16, kv_heads=1, group=1)
    x = heads(case)
    x.q.fill_(1.0)
    x.k.fill_(float("-inf"))
    out = attend(case.segments, x, None)
    assert isinstance(out, Tensor)
    assert out[:5].isnan().all()
    assert (out[5:] == 0).all()


def by_position(segments: Segments, seed: int) -> Segments:
    """Some of the trees by position."""
    roots = np.arange(len(segments))
    for i, parent in enumerate(segments.parents.tolist()):
        roots[i] = roots[parent] if parent >= 0 else i
    return replace(segments, by_position=(roots * 7 + seed) % 3 > 0)


@interpreted
@pytest.mark.parametrize(
    ("kv_heads", "group", "d", "window", "stored", "deep"),
    [(2, 2, 16, None, False, 512), (1, 4, 48, 16, True, 16), (1, 3, 32, 100, False, 32), (1, 1, 16, None, True, 48)],
)
def test_random_forests_by_position(
    kv_heads: int, group: int, d: int, window: int | None, stored: bool, deep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees that ask for it, and what lies deep in a branch."""
    monkeypatch.setattr(tiles, "DEEP", deep)
    case = make_case(random_forest(group + 20, trees=3, stored=stored), kv_heads=kv_heads, group=group, d=d)
    case.segments = by_position(case.segments, group)
    expected = reference.tree_attention(case.q, case.k, case.v, case.stores, case.segments, window=window)
    out = run(case, window)
    assert out.isfinite().all()
    assert float((out - expected).abs().max()) < BOUND


@interpreted
@pytest.mark.parametrize("own", [62, 63, 64, 65, 127, 128])
def test_by_position_a_path_may_end_anywhere_in_a_block(own: int) -> None:
    case = make_case(branches(1, [own, 3]), d=16)
    case.segments = replace(case.segments, by_position=np.ones(3, dtype=bool))
    expected = reference.tree_attention(case.q, case.k, case.v, case.stores, case.segments, window=None)
    assert float((run(case, None) - expected)[: own + 4].abs().max()) < BOUND


@interpreted
def test_codes_by_position_are_the_rounded_result() -> None:
    case = make_case(branches(70, [40, 7]), d=16)
    case.segments = replace(case.segments, by_position=np.ones(3, dtype=bool))
    scale = torch.tensor([0.03125])
    codes = attend(case.segments, heads(case), None, encoding=Encoding("fp8_static", torch.float8_e4m3fn, scale))
    assert isinstance(codes, Codes)
    expected = (run(case, None) / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    used = 117  # nobody writes padding where every row is by position
    assert same_bits(codes.values[:used], expected[:used])


def seen_keys(plan: TilePlan, block: int, window: int | None) -> dict[int, list[tuple[int, int]]]:
    """Per row the (path position, key row) that the kernel sees, in its order."""
    out: dict[int, list[tuple[int, int]]] = {}
    for (first, count, low, high), bounds in zip(plan.tiles.tolist(), plan.ranges[window].tolist(), strict=True):
        begin, end, base = bounds
        for row in range(first, first + count):
            limit, position, offset = (int(a[row]) for a in (plan.limits, plan.positions, plan.offsets))
            blind = -1 if window is None else position - window
            keys = [p for p in range(begin * block, end * block) if blind < p < limit]
            out[row] = [(p, base + p) for p in keys]
            for tile in range(low, high):
                for column in range(block):
                    at = int(plan.depths[tile]) + column % SPAN
                    if plan.slots[tile, row - first] == column // SPAN and at <= offset and limit + at > blind:
                        out[row].append((limit + at, int(plan.keys[tile, column])))
    return out


def seen_by_position(plan: PathPlan, found: Paths, block: int, window: int | None) -> dict[int, list[tuple[int, int]]]:
    """The same for the rows by position."""
    out: dict[int, list[tuple[int, int]]] = {}
    for (first, count, skipped, base, begins), seen_from in zip(
        plan.tiles.tolist(), plan.firsts[window].tolist(), strict=True
    ):
        final = int(found.rows.positions[first : first + count].max())
        keys: dict[int, int] = {}
        for b in range(seen_from, final // block + 1):
            entry = base + b * block if b < skipped else int(plan.table[begins + b])
            named = plan.keys[-1 - entry].tolist() if entry < 0 else range(entry, entry + block)
            keys |= {b * block + i: key for i, key in enumerate(named)}
        for row in range(first, first + count):
            position = int(found.rows.positions[row])
            blind = -1 if window is None else position - window
            assert row not in out
            out[row] = [(p, key) for p, key in keys.items() if blind < p <= position]
    return out


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("deep", [512, 32])
def test_the_work_lists_are_each_row_s_path_in_order(
    deep: int, seed: int, stored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "DEEP", deep)
    rows = random_forest(seed, stored=stored)
    segments = make_segments(rows) if deep == 512 else by_position(make_segments(rows), seed)
    used = max((start + length for source, start, length, _ in rows if source == 0), default=0)
    total = used + seed  # padding
    lengths = [max((s + n for source, s, n, _ in rows if source == i), default=0) for i in range(1, 4)]
    store_rows = np.cumsum([total, *lengths]).tolist()
    tile_rows, block = [(64, 64), (4, 32), (7, 16)][seed % 3]
    found = paths(segments, total, store_rows)
    plan = plan_tiles(found, tile_rows=tile_rows, block=block, windows=(None, 16, 100))
    other = plan_paths(found.rows, tile_rows=tile_rows, block=block, windows=(None, 16, 100))
    assert (other is None) == (deep == 512)
    for window in (None, 16, 100):
        seen = seen_keys(plan, block, window)
        if other is not None:
            also = seen_by_position(other, found, block, window)
            assert also.keys().isdisjoint(seen)
            seen |= also
        for chain in chains(segments):
            for i in range(chain.rows):
                end = chain.position + i + 1
                first = 0 if window is None else max(0, end - window)
                pieces = cut(chain.path, first, end)
                keys = [a + j + (store_rows[s - 1] if s else 0) for s, a, n in pieces for j in range(n)]
                assert seen.pop(chain.start + i) == [*zip(range(first, end), keys, strict=True)]
        assert seen == {row: [] for row in range(used, total)}


def test_spans_of_one_row_never_share_a_key_tile() -> None:
    """Two of them in one tile would share its maximum, and their bits would depend on how spans were laid out."""
    plan = plan_tiles(paths(make_segments(branches(20, [50, 3, 40, 33])), 146), tile_rows=8, block=64, windows=(None,))
    assert len(plan.depths) > len(plan.tiles)
    for low, high in pairwise(np.append(plan.tiles[:, 2], plan.tiles[-1, 3]).tolist()):
        depths = plan.depths[low:high].tolist()
        assert depths == sorted(depths)
    assert (plan.depths % SPAN == 0).all()


def test_what_a_pass_needs_grows_with_its_paths_and_not_with_their_square() -> None:
    """Two questions of 30,000 tokens that part at once, and 2,000 that leave a common one token by token."""
    long = branches(1, [30_000, 30_000])
    comb: Rows = [(0, 0, 10, -1)]
    for i in range(2_000):
        trunk = max(0, 2 * i - 1)  # the segment of the common question's latest token
        comb += [(0, 10 + 2 * i, 1, trunk), (0, 11 + 2 * i, 1, 0 if i == 0 else trunk)]
    for rows, whole in ((long, False), (long, True), (comb, True)):
        segments = replace(make_segments(rows), by_position=np.full(len(rows), whole))
        total = int((segments.starts + segments.lengths).max())
        found = paths(segments, total)
        plan = plan_tiles(found, tile_rows=8, block=32, windows=(None,))
        other = plan_paths(found.rows, tile_rows=8, block=32, windows=(None,))
        assert other is not None
        arrays = [getattr(plan, name) for name in ("tiles", "keys", "depths", "slots")]
        arrays += [found.seen, other.tiles, other.table, other.keys]
        assert sum(array.size for array in arrays) < 100 * total
