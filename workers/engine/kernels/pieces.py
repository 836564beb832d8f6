"""Work in pieces, each computed by one thread from its first step to its last.

The library's own threads split every operation and meet after it. On a piece that fits a core's cache most operations
are over sooner than such a meeting, so here the threads share out pieces, and meet once. It also makes the bits of what
is computed so independent of the number of threads.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache
from itertools import pairwise
from threading import Barrier

import torch

from workers.engine.kernels.freed import keep_freed_memory

_MOST = 16  # threads: each holds Python's lock for a few hundredths of its time
_ELEMENTS = 1 << 18  # of a row piece: a megabyte in float32


@lru_cache(maxsize=1)
def _pool(threads: int) -> ThreadPoolExecutor:
    """Threads whose operations are not split.

    Every thread has its own number of library threads; one that has asked for none takes what any thread set last.
    """
    before = torch.get_num_threads()
    started = Barrier(threads + 1)

    def start() -> None:
        torch.get_num_threads()  # else the thread's first operation would take the number set last
        torch.set_num_threads(1)
        started.wait()

    pool = ThreadPoolExecutor(threads, "pieces", start)
    for _ in range(threads):
        pool.submit(int)  # starts a thread, since those before it wait
    started.wait()
    torch.set_num_threads(before)
    return pool


def _run[T](work: Callable[[T], None], pieces: Iterator[T]) -> None:
    with torch.inference_mode():
        for piece in pieces:
            work(piece)


def each[T](work: Callable[[T], None], pieces: Iterable[T]) -> None:
    """work(piece) for every piece, several at a time, begun in their order. They must write to different places."""
    keep_freed_memory()
    todo = list(pieces)
    left = iter(todo)  # a list's next item is taken in one step under Python's lock
    threads = min(torch.get_num_threads(), _MOST)
    if threads == 1:
        _run(work, left)
        return
    pool = _pool(threads)
    running = [pool.submit(_run, work, left) for _ in range(min(threads, len(todo)))]
    wait(running)
    for done in running:
        done.result()


def row_pieces(rows: int, width: int) -> list[slice]:
    """Slices of about equal length over `rows` rows of `width` numbers, that stay in the cache from step to step."""
    count = max(1, math.ceil(rows * width / _ELEMENTS))
    bounds = [rows * i // count for i in range(count + 1)]
    return [slice(*pair) for pair in pairwise(bounds) if pair[0] < pair[1]]
