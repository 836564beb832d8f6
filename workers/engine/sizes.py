"""Whether a snapshot holds what its config.json describes: asked before memory is taken for it."""

from pathlib import Path

import torch

from workers.engine.errors import LoadError
from workers.engine.models import GemmaConfig, GemmaModel
from workers.engine.shards import Snapshot
from workers.engine.weights import text_name, weight_places


def check_sizes(config: GemmaConfig, snapshot_dir: Path) -> None:
    """LoadError where a weight is missing or has another shape: the two describe other models."""
    with torch.device("meta"):
        model = GemmaModel(config)
    places = weight_places(model)
    missing = set(places)
    with Snapshot(snapshot_dir) as snapshot:
        for stored, tensor in snapshot.tensors.items():
            name = text_name(model, stored)
            if name in places and tensor.shape != places[name].shape:
                shape = list(places[name].shape)
                raise LoadError(f"weight {stored} has shape {list(tensor.shape)}, expected {shape} by config.json")
            missing.discard(name)
    if missing:
        raise LoadError(f"the snapshot lacks {len(missing)} weights: {', '.join(sorted(missing)[:5])}")
