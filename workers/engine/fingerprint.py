"""What the public `system_fingerprint` stands for."""

import hashlib
import json
import platform
from collections.abc import Mapping
from pathlib import Path

import torch

from spinf_serve import __version__
from spinf_serve.config import ServedModel
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


def fingerprint(facts: Mapping[str, str | int | None]) -> str:
    """`fp_` and ten hex digits over the facts."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return "fp_" + hashlib.sha256(text.encode()).hexdigest()[:10]
