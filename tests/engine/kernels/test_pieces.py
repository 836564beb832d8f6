"""Pieces of work shared out to threads: all are done, none is split, failures arrive, and bits hang on no thread."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tests.engine.test_kernels import FREE, draw, same_bits
from tests.engine.test_tree_attention import make_case, random_forest, run
from workers.engine.kernels import pieces
from workers.engine.kernels.encoding import Encoding
from workers.engine.kernels.gelu_mul import gelu_mul
from workers.engine.kernels.lm_head import lm_head_logprobs
from workers.engine.kernels.pieces import each, row_pieces
from workers.engine.kernels.rms_norm import residual_norm
from workers.engine.kernels.rotary import HeadLayout, qkv_norm_rotary

FLOAT = Encoding("float", torch.float32)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of the library's threads."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_piece_is_done_once(threads: Callable[[int], None], count: int) -> None:
    threads(count)
    done: list[int] = []
    each(done.append, range(100))
    assert sorted(done) == list(range(100))
    each(done.append, [])
    assert len(done) == 100


def test_each_piece_has_one_thread_and_the_caller_keeps_its_own(threads: Callable[[int], None]) -> None:
    threads(3)
    pieces._pool.cache_clear()
    met = threading.Barrier(3, timeout=20)  # broken where fewer than three run at a time
    seen: list[int] = []

    def work(_: int) -> None:
        met.wait()
        torch.ones(100_000).exp_()  # an operation that could be split
        seen.append(torch.get_num_threads())

    each(work, range(6))
    assert seen == [1] * 6
    assert torch.get_num_threads() == 3
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert later == [3]


def test_a_failure_arrives(threads: Callable[[int], None]) -> None:
    threads(1)
    with pytest.raises(ZeroDivisionError):
        each(lambda piece: 1 // piece, [1, 0])  # type: ignore[arg-type]


def test_a_failure_waits_for_the_pieces_that_run(threads: Callable[[int], None]) -> None:
    """They write to memory that the caller is about to give up."""
    threads(2)
    begun = threading.Event()
    ended: list[int] = []

    def work(piece: int) -> None:
        if piece == 0:
            assert begun.wait(20)
            raise MemoryError("no room")
        begun.set()
        time.sleep(0.2)
        ended.append(piece)

    with pytest.raises(MemoryError, match="no room"):
        each(work, range(2))
    assert ended == [1]


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (16, 640), (4096, 640), (4097, 5000), (3, 1 << 20)])
def test_row_pieces_cover_all_rows_once(rows: int, width: int) -> None:
    found = row_pieces(rows, width)
    assert [row for piece in found for row in range(rows)[piece]] == list(range(rows))
    lengths = [piece.stop - piece.start for piece in found]
    assert min(lengths) >= 1
    assert max(lengths) - min(lengths) <= 1


def test_no_row_no_piece() -> None:
    assert row_pieces(0, 640) == []


def _residual() -> tuple[Tensor, ...]:
    x = draw(1500, 640)
    result = residual_norm(x, draw(1500, 640, seed=1), draw(640, seed=2), None, draw(640, seed=3), 1e-6, FLOAT)
    assert isinstance(result, Tensor)
    return x, result


def _rotary() -> tuple[Tensor, ...]:
    cos, sin = draw(900, 32), draw(900, 32, seed=1)
    scales = draw(64, seed=2), draw(64, seed=3)
    return qkv_norm_rotary(draw(900, 8 * 64, seed=4), HeadLayout(4, 2, 64), *scales, cos, sin, 1e-6, norm_v=True)


def _head() -> tuple[Tensor, ...]:
    rows, cols = torch.arange(48), torch.arange(48) * 200
    return (lm_head_logprobs(draw(48, 640), draw(10_000, 640, seed=1), rows, cols, None, FREE),)


OPS: dict[str, Callable[[], tuple[Tensor, ...]]] = {
    "residual norm": _residual,
    "heads": _rotary,
    "gelu": lambda: (gelu_mul(draw(700, 2 * 1024)),),
    "head": _head,
    "attention": lambda: (run(make_case(random_forest(7, stored=True), d=64), 100),),
}


@pytest.mark.parametrize("op", OPS)
def test_bits_do_not_depend_on_the_threads(threads: Callable[[int], None], op: str) -> None:
    def of(count: int) -> tuple[Tensor, ...]:
        threads(count)
        return OPS[op]()

    alone = of(1)
    for count in (2, 3):
        assert all(same_bits(a, b) for a, b in zip(of(count), alone, strict=True))
