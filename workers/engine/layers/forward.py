"""The facts of one forward pass, made by the runner and handed down through every layer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from workers.engine.kernels.products import RowRule
from workers.engine.kernels.rotary import HeadLayout
from workers.engine.kernels.tree_attention import AttentionPlan


class KVStore:
    """Keys and values of one content in every layer, kept between passes. layers[i] = (k, v).

    Each is [N, length, D] as the CPU's attention reads it, or [length, N, D] with `rows_first`, as the GPU's does.
    """

    def __init__(
        self, shapes: Sequence[tuple[int, int]], length: int, like: Tensor, *, rows_first: bool = False
    ) -> None:
        """shapes[i] = (N, D) of layer i; `like` gives type and device."""
        self.length, self.rows_first = length, rows_first
        sizes = [(length, n, d) if rows_first else (n, length, d) for n, d in shapes]
        self.layers = [(like.new_empty(size), like.new_empty(size)) for size in sizes]

    def keep(self, layer: int, k: Tensor, v: Tensor, start: int) -> None:
        """Copy the content's rows, from `start` on, out of a pass's k and v."""
        for kept, source in zip(self.layers[layer], (k, v), strict=True):
            kept.copy_(source.narrow(0 if self.rows_first else 1, start, self.length))

    @property
    def num_bytes(self) -> int:
        """Memory of all layers."""
        return sum(k.nbytes + v.nbytes for k, v in self.layers)


@dataclass(frozen=True, slots=True)
class Capture:
    """Rows start … start + store.length of this pass are the content that `store` keeps."""

    store: KVStore
    start: int


@dataclass(frozen=True, slots=True)
class Forward:
    """tokens, positions [T] int64, padding at the end (id 0, position 0); read_rows [R] int64, a padded row count.

    attention: a plan for each layout of heads among the layers.
    """

    tokens: Tensor
    positions: Tensor
    read_rows: Tensor
    attention: Mapping[HeadLayout, AttentionPlan]
    stores: tuple[KVStore, ...]
    captures: tuple[Capture, ...]
    rule: RowRule
