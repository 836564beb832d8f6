"""Tree attention by path position, in Triton: one program for rows of one chain times the G query heads, and a kv head.

The order of the sums is that of path positions in blocks of BN, so a row's bits depend on its path alone, wherever its
content is said to end. Where each block lies is told by the table of `path_blocks`.
"""

import triton
import triton.language as tl

from workers.engine.kernels.tree_attention.online_softmax import softmax_step, store_result


@triton.jit
def _block_rows(block, skipped, base, final, p_table, p_keys, o_n, BN: tl.constexpr):
    """Key rows [BN] of a block of the path; behind position `final`, the last that is seen, its row."""
    entry = tl.load(p_table + block, mask=(block >= skipped) & (block * BN <= final), other=0)
    named = tl.load(p_keys + (-1 - entry).to(tl.int64) * BN + o_n, mask=(o_n >= 0) & (entry < 0), other=0)
    first = tl.where(block < skipped, base + block * BN, entry)
    return tl.where(entry < 0, named, first + tl.minimum(o_n, final - block * BN))


@triton.jit(do_not_specialize=["window"], do_not_specialize_on_alignment=["p_scale"])
def path_attention_kernel(
    p_q, p_k, p_v, p_out, p_scale,
    p_tiles, p_firsts, p_table, p_keys, p_positions,
    window, scale,
    H: tl.constexpr, N: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr, TM: tl.constexpr,
    TILE: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    i_tile, i_n, i_v = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(p_tiles + i_tile * TILE).to(tl.int64)
    count = tl.load(p_tiles + i_tile * TILE + 1)
    skipped = tl.load(p_tiles + i_tile * TILE + 2)
    base = tl.load(p_tiles + i_tile * TILE + 3)
    p_table += tl.load(p_tiles + i_tile * TILE + 4)
    block_first = tl.load(p_firsts + i_tile)

    o_n = tl.arange(0, BN)
    o_d = tl.arange(0, BD)
    o_v = i_v * BV + tl.arange(0, BV)
    token = tl.arange(0, BM) // G
    live = token < count
    row = first + tl.where(live, token, 0)  # rows beyond the tile repeat its first and are not stored
    at = (row * H + i_n * G + tl.arange(0, BM) % G) * D
    position = tl.load(p_positions + row)
    if BD == D:
        o_key, o_value = o_d, o_v
        q = tl.load(p_q + at[:, None] + o_d[None, :])
    else:
        # Columns beyond D repeat the first one: q is zero there, and their results are not stored.
        o_key, o_value = tl.where(o_d < D, o_d, 0), tl.where(o_v < D, o_v, 0)
        q = tl.load(p_q + at[:, None] + o_d[None, :], mask=(o_d < D)[None, :], other=0.0)
    p_k += i_n * D
    p_v += i_n * D

    m = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BV], tl.float32)
    final = tl.max(position, 0)
    rows = _block_rows(block_first, skipped, base, final, p_table, p_keys, o_n, BN)
    for block in range(block_first, final // BN + 1):
        at_keys = rows.to(tl.int64)[:, None] * (N * D)
        k = tl.load(p_k + at_keys + o_key[None, :])
        s = tl.dot(q, tl.trans(k))
        column = block * BN + o_n
        visible = (column[None, :] <= position[:, None]) & (column[None, :] > (position - window)[:, None])
        p, fade, m, total = softmax_step(tl.where(visible, s, float("-inf")), m, total, scale)
        v = tl.load(p_v + at_keys + o_value[None, :])
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None])
        rows = _block_rows(block + 1, skipped, base, final, p_table, p_keys, o_n, BN)

    o_out = at[:, None] + o_v[None, :]
    store_result(p_out, o_out, acc / total[:, None], live[:, None] & (o_v < D)[None, :], p_scale, KIND)
