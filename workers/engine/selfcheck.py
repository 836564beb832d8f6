"""Measures at start what row invariance rests on, for the shapes that the model uses, and chooses the row rule."""

import logging
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from workers.engine.kernels.lm_head.cpu import VOCAB_CHUNK
from workers.engine.kernels.products import RowRule, batch_product, batch_product_add, linear_into, product_into
from workers.engine.kernels.tree_attention.groups import BLOCK

log = logging.getLogger(__name__)

FIXED_ROWS = 64  # rows of every product where the library's own order depends on their number
_MOST_ROWS = 256
_WORK = 4e9  # multiply-adds of one shape's sweep at most: keeps the check under a second on small models


def _same(a: Tensor, b: Tensor) -> bool:
    """Equal bits."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _row_counts(step: int, most: int) -> list[int]:
    """Row counts to compare with the largest: one step, odd multiples, powers of two."""
    return sorted({n * step for n in (1, 2, 3, 5, 7, 8, 13) if n * step < most})


def _draw(rows: int, k: int, o: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [rows, K] and w [O, K].

    In half precision the two halves of each product cancel, and what is left is the rounding of its float32 sums:
    otherwise the rounding at the end would hide the order of the sums.
    """
    x, w = torch.randn(rows, k).to(dtype), torch.randn(o, k).to(dtype)
    if dtype != torch.float32:
        half = k // 2
        x[:, half : 2 * half], w[:, half : 2 * half] = x[:, :half], -w[:, :half]
        x[:, 2 * half :] = 0
    return x, w


def linear_is_invariant(k: int, o: int, rule: RowRule, dtype: torch.dtype = torch.float32) -> bool:
    """Rows of x [·, K] · w [O, K]ᵀ keep their bits for every row count, at another offset, and on one thread.

    Under a fixed rule the last is not asked: a library may split a sum over the threads, and their number is then part
    of the fingerprint.
    """
    rows = max(4, min(_MOST_ROWS, int(_WORK / 8 / k / o)) // rule.multiple) * rule.multiple
    x, w = _draw(rows, k, o, dtype)
    whole = linear_into(x.new_empty(rows, o), x, w, rule)
    for count in _row_counts(rule.multiple, rows):
        for first in {0, rows - count}:
            part = linear_into(x.new_empty(count, o), x[first : first + count], w, rule)
            if not _same(part, whole[first : first + count]):
                return False
    if rule.fixed is not None:
        return True
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = linear_into(x.new_empty(rule.multiple, o), x[: rule.multiple], w, rule)
    torch.set_num_threads(threads)
    return _same(alone, whole[: rule.multiple])


def attention_is_invariant(head_dim: int, rule: RowRule) -> bool:
    """Scores and weighted sums keep their bits for any row and key count, at any offset, and in a batch."""
    step, d = rule.multiple, head_dim
    rows = step * 16
    q, keys = torch.randn(rows, d), torch.randn(4 * BLOCK, d)
    p, start = torch.rand(rows, 4 * BLOCK), torch.randn(rows, d)
    scores = product_into(q.new_empty(rows, 4 * BLOCK), q, keys.t(), rule)
    sums = product_into(start.clone(), p[:, :BLOCK], keys[:BLOCK], rule, add=True)
    for count in _row_counts(step, rows):
        for first in {0, rows - count}:
            at = slice(first, first + count)
            block = product_into(q.new_empty(count, BLOCK), q[at], keys[BLOCK : 2 * BLOCK].t(), rule)
            part = product_into(start[at].clone(), p[at, :BLOCK], keys[:BLOCK], rule, add=True)
            if not (_same(block, scores[at, BLOCK : 2 * BLOCK]) and _same(part, sums[at])):
                return False
    batch_keys = keys[:BLOCK].expand(16, -1, -1).clone()
    batch_scores = batch_product(q.view(16, step, d), batch_keys.transpose(1, 2), rule).view(rows, BLOCK)
    batch_sums = start.clone().view(16, step, d)
    batch_product_add(batch_sums, p.view(16, step, -1)[:, :, :BLOCK], batch_keys, rule)
    return _same(batch_scores, scores[:, :BLOCK]) and _same(batch_sums.view(rows, d), sums)


def elementwise_is_invariant() -> bool:
    """exp, tanh, cos, sin and sums over the last dimension do not depend on an element's or a row's place."""
    x = torch.randn(64 * 1031) * 8
    for op in (torch.exp, torch.tanh, torch.cos, torch.sin):
        whole = op(x)
        scalar = torch.cat([op(part) for part in torch.split(x[:2100], 7)])  # too short for vector code
        if not _same(scalar, whole[:2100]):
            return False
        if not all(_same(op(x[i : i + n]), whole[i : i + n]) for i, n in ((5, 33), (7, 40_003), (31, 65_537))):
            return False
    table = x[: 64 * 1024].view(64, 1024)
    sums: tuple[Callable[[Tensor], Tensor], ...] = (
        lambda t: t.sum(dim=1),
        lambda t: torch.linalg.vector_norm(t, dim=1),
    )
    return all(_same(op(table[i : i + n]), op(table)[i : i + n]) for op in sums for i, n in ((0, 16), (3, 17), (7, 48)))


def verify_invariance(
    linear_shapes: Iterable[tuple[int, int]],
    hidden: int,
    head_dims: Iterable[int],
    dtype: torch.dtype = torch.float32,
) -> tuple[RowRule, bool]:
    """The row rule that this machine's library allows, and whether the elementwise ops keep their promise.

    linear_shapes  (K, O) of every linear product, in `dtype`; the head's chunk [hidden → VOCAB_CHUNK] is added here
    head_dims      D of every layer; the attention computes in float32 whatever `dtype` is
    """
    with torch.random.fork_rng(devices=[]):  # a library's caller keeps the state of the generator
        torch.manual_seed(0)
        products = {(k, o, dtype) for k, o in linear_shapes} | {(hidden, VOCAB_CHUNK, dtype)}
        return _verify(products, set(head_dims))


def _verify(products: set[tuple[int, int, torch.dtype]], head_dims: set[int]) -> tuple[RowRule, bool]:
    rule = RowRule()
    shapes = sorted(products, key=lambda product: product[:2])
    failed = [f"{k} → {o}" for k, o, dtype in shapes if not linear_is_invariant(k, o, rule, dtype)]
    attention = all(attention_is_invariant(head_dim, rule) for head_dim in head_dims)
    if failed or not attention:
        log.warning(
            "the library's products depend on the number of rows or threads here (linear: %s; attention: %s): "
            "all run in pieces of %d rows, which is slower and keeps the bits",
            ", ".join(failed) or "fine",
            "fine" if attention else "not",
            FIXED_ROWS,
        )
        rule = RowRule(FIXED_ROWS, FIXED_ROWS)
    elementwise = elementwise_is_invariant()
    if not elementwise:
        log.warning("exp, tanh, cos, sin or sums depend on an element's place here: scores are not batch-invariant")
    return rule, elementwise
