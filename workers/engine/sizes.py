"""Whether a snapshot holds what its config.json describes, and a GPU computes it: asked before memory is taken."""

from pathlib import Path

import torch

from workers.engine.errors import LoadError
from workers.engine.kernels.linear.library import MULTIPLE
from workers.engine.models import GemmaConfig, GemmaModel
from workers.engine.schemes import quant_linears
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


def check_gpu_sizes(config: GemmaConfig, model: GemmaModel, scheme: str) -> None:
    """LoadError where the kernels of a GPU have no form for a size, which the first pass would find otherwise.

    model: of the config, in the scheme; it may be empty
    """
    from workers.engine.kernels.linear.kernel import MAX_INT8_K  # these need Triton
    from workers.engine.kernels.tree_attention.kernel import tile_shape

    for layout in config.layouts.values():
        try:
            tile_shape(layout.head_dim, layout.group)
        except ValueError as error:
            raise LoadError(f"config.json: {error} on a GPU") from None
    for name, linear in quant_linears(model).items():
        o, k = linear.weight.shape
        if scheme.startswith("fp8") and (k % MULTIPLE or o % MULTIPLE):
            raise LoadError(
                f"{name} is a product of {k} by {o}, and {scheme} needs multiples of {MULTIPLE}: "
                "choose --quant w8a16, w8a8 or bf16"
            )
        if scheme == "w8a8" and k > MAX_INT8_K:
            raise LoadError(f"{name} sums {k} products, and w8a8 at most {MAX_INT8_K}: choose --quant w8a16 or bf16")
