"""The bound: the time of a model's matrix products alone, without attention, norms, activations or softmax."""

import time

import torch
from torch.nn import functional

from workers.engine.models import GemmaConfig

_ROWS = (256, 512, 1024, 4096)  # rows of one call; the best of them counts
_HEAD_COLUMNS = 8192


def _shapes(config: GemmaConfig, layer: int) -> list[tuple[int, int]]:
    """(K, O) of a layer's products."""
    hidden, inner, layout = config.hidden_size, config.intermediate_size, config.layout(layer)
    return [
        (hidden, layout.width),
        (layout.num_heads * layout.head_dim, hidden),
        (hidden, 2 * inner),
        (inner, hidden),
    ]


@torch.inference_mode()
def _linear_seconds(config: GemmaConfig, tokens: int, rows: int, dtype: torch.dtype) -> float:
    seconds = 0.0
    shapes = [_shapes(config, i) for i in range(len(config.layer_types))]
    weights = [[torch.randn(o, k).to(dtype) for k, o in layer] for layer in shapes]
    inputs = {k: torch.randn(rows, k).to(dtype) for layer in shapes for k, _ in layer}
    outputs = {o: torch.empty(rows, o, dtype=dtype) for layer in shapes for _, o in layer}
    for first in range(0, tokens, rows):
        count = min(rows, tokens - first)
        started = time.perf_counter()
        for layer in weights:
            for weight in layer:
                o, k = weight.shape
                torch.mm(inputs[k][:count], weight.t(), out=outputs[o][:count])
        seconds += time.perf_counter() - started
    return seconds


@torch.inference_mode()
def _head_seconds(config: GemmaConfig, reads: int, dtype: torch.dtype) -> float:
    x, weight = (torch.randn(n, config.hidden_size).to(dtype) for n in (reads, config.vocab_size))
    started = time.perf_counter()
    for first in range(0, config.vocab_size, _HEAD_COLUMNS):
        functional.linear(x, weight[first : first + _HEAD_COLUMNS])
    return time.perf_counter() - started


def product_seconds(config: GemmaConfig, tokens: int, reads: int, repeats: int, dtype: torch.dtype) -> float:
    """Seconds of all linear products of `tokens` rows and the head's of `reads` rows: the best repeat and row count."""
    linear = min(_linear_seconds(config, tokens, rows, dtype) for rows in _ROWS for _ in range(repeats))
    return linear + min(_head_seconds(config, reads, dtype) for _ in range(repeats))
