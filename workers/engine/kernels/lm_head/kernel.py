"""The head on an NVIDIA GPU: three kernels, none of which holds the logits of a row.

1. Tiles of rows and vocabulary: logits, soft-cap, and of every row in the tile the largest and the sum of exponentials.
2. Row by row, the tiles in vocabulary order: the largest of all, and the logarithm of the whole sum.
3. The entries: their own logits, less the two.

The logits of 1 and 3 are the same bits: the same operands go through the same instruction, 16 products of K at a time
from first to last. So the probabilities of a whole row sum to 1 however the tensor cores round. Nothing is chosen by R
or C, no sum is split, and a row's numbers meet no other row's: its bits depend on nothing else (see `kernels.linear`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.engine.kernels.launch import cdiv, launch, next_power_of_2

__all__ = ["lm_head_logprobs"]

ROWS, VOCAB, BLOCK_K = 128, 256, 64
ENTRIES = 64  # the least rows of the tensor cores' instruction
MAX_ROWS = 2048
"""Rows of one sweep over the weight: bounds what step 1 leaves for step 2 at 16 MiB for 262,144 tokens."""


@triton.jit
def _tanh(z):
    """Within a few units in the last place: from exp where nothing cancels, else the series up to z^9."""
    t = tl.exp(-2.0 * tl.abs(z))
    far = (1.0 - t) / (1.0 + t)
    s = z * z
    near = z * (1.0 + s * (-1.0 / 3 + s * (2.0 / 15 + s * (-17.0 / 315 + s * (62.0 / 2835)))))
    return tl.where(s < 0.0625, near, tl.where(z < 0, -far, far))


@triton.jit
def _cap(logits, CAP: tl.constexpr):
    if CAP is not None:
        logits = _tanh(logits * (1.0 / CAP)) * CAP
    return logits


@triton.jit
def _dot(p_x, p_weight, acc, K: tl.constexpr, BK: tl.constexpr):
    """acc + the products along K of the rows that the pointers [rows, BK] begin."""
    i_k = tl.arange(0, BK)
    for k in range(0, K, BK):
        if K % BK == 0:
            b_x = tl.load(p_x)
            b_weight = tl.load(p_weight)
        else:
            b_x = tl.load(p_x, mask=i_k[None, :] < K - k, other=0.0)
            b_weight = tl.load(p_weight, mask=i_k[None, :] < K - k, other=0.0)
        acc = tl.dot(b_x, tl.trans(b_weight), acc)
        p_x += BK
        p_weight += BK
    return acc


@triton.jit(do_not_specialize=["rows"])
def _tiles_kernel(
    x,
    weight,
    maxima,
    sums,
    rows,
    K: tl.constexpr,
    V: tl.constexpr,
    CAP: tl.constexpr,
    BR: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
):
    """maxima, sums [rows, vocabulary tiles]."""
    # all rows pass over a piece of the weight before the next one is read
    row_tiles = tl.cdiv(rows, BR)
    row = (tl.program_id(0) % row_tiles) * BR
    tile = tl.program_id(0) // row_tiles
    token = tile * BV
    vocab_tiles: tl.constexpr = (V + BV - 1) // BV
    i_row = tl.arange(0, BR)
    i_token = tl.arange(0, BV)
    i_k = tl.arange(0, BK)
    p_x = x + row.to(tl.int64) * K + (tl.minimum(i_row, rows - 1 - row)[:, None] * K + i_k[None, :])
    p_weight = weight + token.to(tl.int64) * K + (tl.minimum(i_token, V - 1 - token)[:, None] * K + i_k[None, :])
    logits = _cap(_dot(p_x, p_weight, tl.zeros((BR, BV), tl.float32), K, BK), CAP)
    if V % BV != 0:
        logits = tl.where((token + i_token < V)[None, :], logits, float("-inf"))
    top = tl.max(logits, axis=1)
    total = tl.sum(tl.exp(logits - top[:, None]), axis=1)
    at = (row + i_row).to(tl.int64) * vocab_tiles + tile
    tl.store(maxima + at, top, mask=row + i_row < rows)
    tl.store(sums + at, total, mask=row + i_row < rows)


@triton.jit
def _rows_kernel(maxima, sums, largest, log_sum, TILES: tl.constexpr, BLOCK: tl.constexpr):
    """largest, log_sum [rows]: log Σ exp = largest + log_sum."""
    row = tl.program_id(0)
    i_tile = tl.arange(0, BLOCK)
    at = row.to(tl.int64) * TILES + i_tile
    b_maxima = tl.load(maxima + at, mask=i_tile < TILES, other=float("-inf"))
    b_sums = tl.load(sums + at, mask=i_tile < TILES, other=0.0)
    top = tl.max(b_maxima, axis=0)
    tl.store(largest + row, top)
    tl.store(log_sum + row, tl.log(tl.sum(b_sums * tl.exp(b_maxima - top), axis=0)))


@triton.jit(do_not_specialize=["entries"], do_not_specialize_on_alignment=["entry_rows", "entry_cols"])
def _entries_kernel(
    x,
    weight,
    entry_rows,
    entry_cols,
    largest,
    log_sum,
    out,
    entries,
    K: tl.constexpr,
    CAP: tl.constexpr,
    BE: tl.constexpr,
    BK: tl.constexpr,
):
    """Each of BE entries is on the diagonal of the product of their rows with their columns."""
    i_entry = tl.arange(0, BE)
    at = tl.program_id(0).to(tl.int64) * BE + i_entry
    here = tl.minimum(at, entries - 1)
    row = tl.load(entry_rows + here)
    col = tl.load(entry_cols + here)
    i_k = tl.arange(0, BK)
    p_x = x + row[:, None] * K + i_k[None, :]
    p_weight = weight + col[:, None] * K + i_k[None, :]
    products = _dot(p_x, p_weight, tl.zeros((BE, BE), tl.float32), K, BK)
    logits = _cap(tl.sum(tl.where(i_entry[:, None] == i_entry[None, :], products, 0.0), axis=1), CAP)
    tl.store(out + at, logits - tl.load(largest + row) - tl.load(log_sum + row), mask=at < entries)


def lm_head_logprobs(
    x: Tensor, weight: Tensor, entry_rows: Tensor, entry_cols: Tensor, softcap: float | None
) -> Tensor:
    """The op of `kernels.lm_head`: [C] float32. weight is bf16; TypeError for another type."""
    if weight.dtype != torch.bfloat16:
        raise TypeError(f"no head in {weight.dtype}")
    x = x.to(torch.bfloat16)
    (rows, k), (vocab, entries) = x.shape, (weight.shape[0], entry_rows.shape[0])
    out = x.new_empty(entries, dtype=torch.float32)
    if not entries:
        return out
    assert all(t.is_contiguous() for t in (x, weight, entry_rows, entry_cols))
    tiles = cdiv(vocab, VOCAB)
    maxima, sums = (x.new_empty(min(rows, MAX_ROWS), tiles, dtype=torch.float32) for _ in range(2))
    largest, log_sum = (x.new_empty(rows, dtype=torch.float32) for _ in range(2))
    sizes = {"K": k, "CAP": softcap, "BK": BLOCK_K}
    for first in range(0, rows, MAX_ROWS):
        piece = x[first : first + MAX_ROWS]
        grid = (cdiv(len(piece), ROWS) * tiles,)
        launch(
            _tiles_kernel,
            grid,
            piece,
            weight,
            maxima,
            sums,
            len(piece),
            V=vocab,
            BR=ROWS,
            BV=VOCAB,
            num_warps=8,
            num_stages=3,
            **sizes,
        )
        launch(
            _rows_kernel,
            (len(piece),),
            maxima,
            sums,
            largest[first:],
            log_sum[first:],
            TILES=tiles,
            BLOCK=next_power_of_2(tiles),
        )
    launch(
        _entries_kernel,
        (cdiv(entries, ENTRIES),),
        x,
        weight,
        entry_rows,
        entry_cols,
        largest,
        log_sum,
        out,
        entries,
        BE=ENTRIES,
        num_warps=4,
        **sizes,
    )
    return out
