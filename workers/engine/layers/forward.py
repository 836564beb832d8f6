"""The facts of one forward pass, made by the runner and handed down through every layer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from workers.engine.kernels.products import RowRule
from workers.engine.kernels.tree_attention import AttentionPlan


class KVStore:
    """Keys and values of one content in every layer, kept between passes. layers[i] = (k, v), each [N, length, D]."""

    def __init__(self, shapes: Sequence[tuple[int, int]], length: int, like: Tensor) -> None:
        """shapes[i] = (N, D) of layer i; `like` gives type and device."""
        self.length = length
        self.layers = [(like.new_empty(n, length, d), like.new_empty(n, length, d)) for n, d in shapes]

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

    attention: a plan for each G (query heads on one key/value head) among the layers.
    """

    tokens: Tensor
    positions: Tensor
    read_rows: Tensor
    attention: Mapping[int, AttentionPlan]
    stores: tuple[KVStore, ...]
    captures: tuple[Capture, ...]
    rule: RowRule
