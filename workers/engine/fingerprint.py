"""What the public `system_fingerprint` stands for."""

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import torch

from spinf_serve import __version__
from spinf_serve.config import ServedModel
from workers.engine import kernels
from workers.engine.device import Card
from workers.engine.kernels.lm_head.cpu import VOCAB_CHUNK
from workers.engine.kernels.products import RowRule
from workers.engine.kernels.tree_attention.groups import BLOCK
from workers.engine.processor import cpu_field

SETTINGS = (
    "CUBLASLT_WORKSPACE_SIZE",
    "CUBLAS_WORKSPACE_CONFIG",
    "DISABLE_LLVM_OPT",
    "DISABLE_PTXAS_OPT",
    "PTXAS_OPTIONS",
    "TORCH_CUBLASLT_UNIFIED_WORKSPACE",
    "TRITON_DEFAULT_FP_FUSION",
    "TRITON_KERNEL_OVERRIDE",
    "TRITON_LIBDEVICE_PATH",
    "TRITON_OVERRIDE_ARCH",
    "TRITON_PTXAS_BLACKWELL_PATH",
    "TRITON_PTXAS_PATH",
)
"""Of the environment: what makes Triton compile other arithmetic (multiply-adds that are fused or not), and what the
library may choose other products by. Not what says where things are kept, or what is printed."""


def cpu_name() -> str:
    """The processor's model name, as the kernel tells it; the architecture where it does not."""
    return cpu_field("model name") or platform.processor() or platform.machine()


def score_facts(model: ServedModel, scheme: str, rule: RowRule) -> dict[str, str | int | None]:
    """Everything that changes a score. The number of threads does so only where the library failed the check of it."""
    facts: dict[str, str | int | None] = {
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
        "mkl": os.environ.get("MKL_CBWR"),
    }
    if rule.fixed is not None:
        facts["threads"] = torch.get_num_threads()
    return facts


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
        "kernels": kernel_sources(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cublas": _cublas_version(),
        "triton": metadata.version("triton"),
        "settings": " ".join(f"{name}={os.environ[name]}" for name in SETTINGS if name in os.environ),
        "gpu": card.name,
        "compute_capability": f"{card.capability[0]}.{card.capability[1]}",
        "processors": card.processors,
    }


def _cublas_version() -> str | None:
    """Of the package whose fp8 products run; pip replaces it without torch. None where torch brings its own."""
    for name in ("nvidia-cublas", "nvidia-cublas-cu12"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def kernel_sources() -> str:
    """A digest of the ops' sources. Tiles, orders of sums, roundings: what of them is part of a score's bits is not
    told apart from what is not, so that none is forgotten.
    """
    digest = hashlib.sha256()
    folder = Path(kernels.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:10]


def fingerprint(facts: Mapping[str, str | int | None]) -> str:
    """`fp_` and ten hex digits over the facts."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return "fp_" + hashlib.sha256(text.encode()).hexdigest()[:10]
