"""The micro-layer: a small layer over macros and reads, and the lock that ties it to what it was fitted on."""

import base64
import binascii
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spinf_serve.packs.model import MicroLayer


def lock_of(data: Mapping[str, Any]) -> str:
    """The lock of a pack file's content: SHA-256 over its queries, reads, Platt pairs and the layer's inputs.

    `data` is the parsed file as it stands, numbers unconverted: 1 and 1.0 are different locks, as in Python's JSON.
    """
    locked = {
        "queries": data["scoring"]["queries"],
        "reads": data["reads"],
        "platt": {name: category["platt"] for name, category in data["categories"].items()},
        "inputs": data["decision"]["micro_layer"]["inputs"],
    }
    canonical = json.dumps(locked, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(canonical.encode("ascii")).hexdigest()


def weight_count(inputs: int, hidden: int | None) -> int:
    """Numbers in a layer's weights, bias and threshold included."""
    return inputs + 2 if hidden is None else inputs * hidden + 2 * hidden + 2


def decode_weights(text: str) -> tuple[float, ...]:
    """Base64 of little-endian float32. Raises `ValueError` where it is neither, or a number in it is not finite."""
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("is not base64") from None
    if len(raw) % 4:
        raise ValueError("is not a whole number of float32 values")
    weights = np.frombuffer(raw, dtype="<f4").astype(np.float64)
    if not np.isfinite(weights).all():
        raise ValueError("holds a number that is not finite")
    return tuple(weights.tolist())


def encode_weights(values: Sequence[float]) -> str:
    """What `decode_weights` reads: for whoever fits a layer."""
    return base64.b64encode(np.asarray(values, dtype="<f4").tobytes()).decode("ascii")


def layer_value(layer: MicroLayer, x: Sequence[float]) -> float:
    """The layer's value in float64 for inputs x [n]."""
    if layer.hidden is None:
        return math.sumprod(layer.weights, x) + layer.bias
    n, h = len(layer.inputs), layer.hidden
    w1, b1, w2 = layer.weights[: n * h], layer.weights[n * h : n * h + h], layer.weights[n * h + h :]
    units = [math.tanh(math.sumprod(x, w1[unit::h]) + b1[unit]) for unit in range(h)]
    return math.sumprod(w2, units) + layer.bias
