"""What the public `system_fingerprint` stands for."""

import hashlib
import importlib
import json
import pkgutil
import platform
from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import torch

from spinf_serve import __version__
from spinf_serve.config import ServedModel
from workers.engine import kernels
from workers.engine.device import Card
from workers.engine.kernels.lm_head.cpu import VOCAB_CHUNK
from workers.engine.kernels.products import RowRule
from workers.engine.kernels.tree_attention.groups import BLOCK


def cpu_name() -> str:
    """The processor's model name, as the kernel tells it; the architecture where it does not."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def score_facts(model: ServedModel, scheme: str, rule: RowRule) -> dict[str, str | int | None]:
    """Everything that changes a score. The thread count is left out: it changes none."""
    return {
        "model": model.id,
        "revision": model.revision,
        "scheme": scheme,
        "head": model.head,
        "engine": __version__,
        "attention_block": BLOCK,
        "vocab_chunk": VOCAB_CHUNK,
        "fixed_rows": rule.fixed,
        "torch": torch.__version__,
        "torch_build": hashlib.sha256(torch.__config__.show().encode()).hexdigest()[:10],
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu": cpu_name(),
    }


def cuda_facts(model: ServedModel, scheme: str, card: Card, calibration: str | None) -> dict[str, str | int | None]:
    """Everything that changes a score on a GPU. The libraries choose products by the card, so it is named whole.

    calibration: digest of the scales of inputs where they come from beside the snapshot; those in it are its revision's
    """
    return {
        "model": model.id,
        "revision": model.revision,
        "scheme": scheme,
        "head": model.head,
        "calibration": calibration,
        "engine": __version__,
        **kernel_bits(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": metadata.version("triton"),
        "gpu": card.name,
        "compute_capability": f"{card.capability[0]}.{card.capability[1]}",
        "processors": card.processors,
    }


def kernel_bits() -> dict[str, int]:
    """The constants of the GPU kernels that are part of a score's bits: every op's `kernel.BITS`, by op and name."""
    found: dict[str, int] = {}
    for op in sorted(entry.name for entry in pkgutil.iter_modules(kernels.__path__) if entry.ispkg):
        name = f"{kernels.__name__}.{op}.kernel"
        if find_spec(name) is None:
            continue
        bits: Mapping[str, int] = getattr(importlib.import_module(name), "BITS", {})
        found |= {f"{op}.{key}": value for key, value in bits.items()}
    return found


def fingerprint(facts: Mapping[str, str | int | None]) -> str:
    """`fp_` and ten hex digits over the facts."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return "fp_" + hashlib.sha256(text.encode()).hexdigest()[:10]
