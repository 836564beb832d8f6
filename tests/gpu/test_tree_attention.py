"""The compiled attention kernel: right at real head shapes, and a row's bits in any company."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engine.test_tree_attention import Rows, make_segments, random_forest
from tests.support.attention import Heads, attend
from workers.engine.kernels.encoding import Codes, Encoding
from workers.engine.kernels.tree_attention import Segments, kernel, path_kernel, reference
from workers.engine.kernels.tree_attention.segments import chains

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU"),
]

SHAPES = [(8, 2, 256), (1, 16, 512), (4, 8, 512), (2, 4, 128), (2, 1, 64), (1, 3, 96)]
"""(N, G, D): sliding and full layers of the 12B, full layers of the 31B, others."""


def draw(segments: Segments, kv_heads: int, group: int, d: int, stores: list[int], seed: int = 0) -> Heads:
    """Random inputs of a pass, padded to 16 rows; scores spread over some ±5."""
    used = int((segments.starts + segments.lengths)[segments.sources == 0].max())
    t = -(-used // 16) * 16
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to("cuda", torch.bfloat16)

    q = normal(t, kv_heads * group, d) * (2 / d**0.5)
    kept = [(normal(n, kv_heads, d), normal(n, kv_heads, d)) for n in stores]
    return Heads(q, normal(t, kv_heads, d), normal(t, kv_heads, d), kept)


def exact(segments: Segments, x: Heads, window: int | None) -> tuple[Tensor, Tensor]:
    """(the op in float64, the same over |v|: what a relative fault of the weights moves), float32 [T, H·D]."""
    t, h, d = x.q.shape
    n = x.k.shape[1]
    q = x.q.float().cpu().view(t, n, h // n, d).permute(1, 0, 2, 3)
    k, v = (a.float().cpu().transpose(0, 1) for a in (x.k, x.v))
    stores = [(a.float().cpu().transpose(0, 1), b.float().cpu().transpose(0, 1)) for a, b in x.stores]
    out = reference.tree_attention(q, k, v, stores, segments, window=window)
    sizes = [(a, b.abs()) for a, b in stores]
    return out, reference.tree_attention(q, k, v.abs(), sizes, segments, window=window)


def by_position(segments: Segments) -> Segments:
    return replace(segments, by_position=np.ones(len(segments), dtype=bool))


def store_lengths(rows: Rows) -> list[int]:
    count = max(source for source, *_ in rows)
    return [max((s + n for source, s, n, _ in rows if source == i), default=1) for i in range(1, count + 1)]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("stored", [False, True], ids=["passes", "stores"])
@pytest.mark.parametrize("whole", [False, True], ids=["by branch", "by position"])
@pytest.mark.parametrize(("kv_heads", "group", "d"), SHAPES)
def test_random_forests(kv_heads: int, group: int, d: int, whole: bool, stored: bool, window: int | None) -> None:
    """The weights are rounded to bf16, and the result is: by 2^-8 of their size at most, each."""
    rows = random_forest(group + d, stored=stored)
    segments = make_segments(rows)
    if whole:
        segments = by_position(segments)
    x = draw(segments, kv_heads, group, d, store_lengths(rows))
    expected, sizes = exact(segments, x, window)
    out = attend(segments, x, window)
    assert isinstance(out, Tensor)
    bound = 2**-8 * (sizes + expected.abs()) * 1.02 + 1e-5
    assert ((out.float().cpu() - expected).abs() <= bound).all()
    scale = torch.tensor([0.015625], device="cuda")
    codes = attend(segments, x, window, encoding=Encoding("fp8_static", torch.float8_e4m3fn, scale))
    assert isinstance(codes, Codes)
    loose = bound + (expected.abs() + bound).clamp(min=2**-6 * 0.015625) * 2**-4  # half a step of 2^-3
    assert ((codes.values.float().cpu() * 0.015625 - expected).abs() <= loose).all()


def branches(content: int, lengths: list[int]) -> Rows:
    """A content of some rows with branches of these lengths."""
    rows: Rows = [(0, 0, content, -1)]
    row = content
    for length in lengths:
        rows.append((0, row, length, 0))
        row += length
    return rows


@pytest.mark.parametrize(("kv_heads", "group", "d"), SHAPES)
@pytest.mark.parametrize("window", [None, 200])
def test_by_position_a_path_keeps_its_bits_wherever_it_forks(
    kv_heads: int, group: int, d: int, window: int | None
) -> None:
    """A path of 420 rows as one content, with a content of other lengths, forked on its way, and in a store."""
    length = 420
    alone = by_position(make_segments(branches(length, [])))
    x = draw(alone, kv_heads, group, d, [])
    expected = attend(alone, x, window)[:length]
    assert isinstance(expected, Tensor)
    for seed, cuts in enumerate(([1], [32], [33, 47, 200], [64, 128, 129], [100, 101, 102, 103, 419], [400])):
        rows: Rows = []
        mine: list[int] = []  # where the path's rows stand
        at, parent = 0, -1
        for first, last in zip([0, *cuts], [*cuts, length], strict=True):
            rows.append((0, at, last - first, parent))
            parent, forked = len(rows) - 1, parent
            mine += range(at, at + last - first)
            at += last - first
            if forked >= 0:  # a stranger beside it, behind it in the pass, or between it and what follows
                rows.append((0, at, 5 + seed, forked))
                at += 5 + seed
        segments = by_position(make_segments(rows))
        packed = draw(segments, kv_heads, group, d, [], seed=seed + 1)
        for whole, part in zip((packed.q, packed.k, packed.v), (x.q, x.k, x.v), strict=True):
            whole[mine] = part[:length]
        out = attend(segments, packed, window)
        assert isinstance(out, Tensor)
        assert same_bits(out[mine], expected), cuts
    own = [torch.cat([a[333:length], a[:9]]) for a in (x.q, x.k, x.v)]
    stored = Heads(*own, [(x.k[:333].contiguous(), x.v[:333].contiguous())])
    out = attend(by_position(make_segments([(1, 0, 333, -1), (0, 0, length - 333, 0)])), stored, window)
    assert isinstance(out, Tensor)
    assert same_bits(out[: length - 333], expected[333:])


@pytest.mark.parametrize(("kv_heads", "group", "d"), SHAPES)
@pytest.mark.parametrize(("content", "own"), [(37, 20), (300, 12), (1, 40), (130, 70), (45, 700)])
def test_a_branch_keeps_its_bits_among_others(kv_heads: int, group: int, d: int, content: int, own: int) -> None:
    """The branch moves through the slots of key tiles and the rows of query tiles; its path stays what it is."""
    alone = make_segments(branches(content, [own]))
    x = draw(alone, kv_heads, group, d, [])
    expected = attend(alone, x, 200)[: content + own]
    for i, before in enumerate(([], [5], [17], [3, 9, 30], [1] * 9, [40, 2], [12] * 25)):
        lengths = [*before, own, 11]
        segments = make_segments(branches(content, lengths))
        start = content + sum(before)
        packed = draw(segments, kv_heads, group, d, [], seed=i + 1)
        for whole, part in zip((packed.q, packed.k, packed.v), (x.q, x.k, x.v), strict=True):
            whole[:content] = part[:content]
            whole[start : start + own] = part[content : content + own]
        out = attend(segments, packed, 200)
        assert same_bits(out[:content], expected[:content]), before
        assert same_bits(out[start : start + own], expected[content:]), before


@pytest.mark.parametrize(("kv_heads", "group", "d"), SHAPES[:3])
@pytest.mark.parametrize("window", [None, 64])
def test_trees_keep_their_bits_in_any_order(kv_heads: int, group: int, d: int, window: int | None) -> None:
    trees = [tree_rows(seed) for seed in range(10)]
    inputs = [draw(make_segments(rows), kv_heads, group, d, [], seed=i) for i, rows in enumerate(trees)]
    sizes = [sum(n for _, _, n, _ in rows) for rows in trees]
    alone = [attend(make_segments(rows), x, window)[:n] for rows, x, n in zip(trees, inputs, sizes, strict=True)]
    for order in (range(10), range(9, -1, -1), np.random.default_rng(0).permutation(10)):
        rows: Rows = []
        at = 0
        for i in order:
            rows += [(0, s + at, n, p + len(rows) if p >= 0 else -1) for _, s, n, p in trees[i]]
            at += sizes[i]
        pad = -at % 16
        parts = [(inputs[i], sizes[i]) for i in order]
        x = Heads(*(torch.cat([getattr(a, f)[:n] for a, n in parts] + [getattr(inputs[0], f)[:pad]]) for f in "qkv"))
        out = attend(make_segments(rows), x, window)
        at = 0
        for i in order:
            assert same_bits(out[at : at + sizes[i]], alone[i]), i
            at += sizes[i]


def tree_rows(seed: int) -> Rows:
    """One random tree, its rows from 0 on."""
    return random_forest(100 + seed, trees=1)


def test_a_stored_content_gives_the_bits_of_one_in_the_pass() -> None:
    together = make_segments(branches(700, [12, 5, 30]))
    x = draw(together, 8, 2, 256, [])
    expected = attend(together, x, 512)[700:747]
    rows: Rows = [(1, 0, 700, -1), (0, 0, 12, 0), (0, 12, 5, 0), (0, 17, 30, 0)]
    own = [torch.cat([a[700:747], a[:1]]) for a in (x.q, x.k, x.v)]
    stored = Heads(*own, [(x.k[:700].contiguous(), x.v[:700].contiguous())])
    assert same_bits(attend(make_segments(rows), stored, 512)[:47], expected)


def test_nothing_is_compiled_for_a_pass_of_another_shape() -> None:
    first = make_segments(branches(40, [3]))
    x = draw(first, 8, 2, 256, [])
    attend(first, x, 1024)
    attend(by_position(first), x, 1024)
    before = compiled()
    assert before
    for content, lengths in ((1, [1]), (16, [16]), (2000, [7] * 300), (64, []), (3, [200])):
        segments = make_segments(branches(content, lengths))
        attend(segments, draw(segments, 8, 2, 256, []), 1024)
        attend(by_position(segments), draw(segments, 8, 2, 256, []), None)
    assert compiled() == before


def compiled() -> list[object]:
    """What Triton compiled of the kernels."""
    kernels = (kernel._tree_attention_kernel, path_kernel.path_attention_kernel)
    return [key for one in kernels for cache in one.device_caches.values() for key in cache[0]]


def test_padding_rows_are_zero() -> None:
    segments = make_segments(branches(20, [7]))
    x = draw(segments, 1, 2, 64, [])
    assert sum(chain.rows for chain in chains(segments)) == 27
    out = attend(segments, x, None)
    assert isinstance(out, Tensor)
    assert out[:27].any(dim=1).all()
    assert not out[27:].view(torch.uint8).any()
