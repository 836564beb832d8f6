"""From a snapshot to a model that runs: on the CPU in plain types, on a GPU in the chosen scheme."""

import logging
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
from torch import nn

from spinf_serve import __version__
from spinf_serve.config import EngineConfig
from spinf_serve.plan import EngineInfo
from workers.engine.clock import Clock, CudaClock
from workers.engine.compiles import CompileCounter
from workers.engine.device import (
    check_memory,
    choose_scheme,
    open_card,
    pass_bytes,
)
from workers.engine.errors import LoadError
from workers.engine.fingerprint import cpu_name, cuda_facts, fingerprint, score_facts
from workers.engine.kernels.products import RowRule
from workers.engine.memory import CudaAllocator, Memory
from workers.engine.models import GemmaConfig, GemmaModel, model_config
from workers.engine.models.config import read_config
from workers.engine.pipeline import AnyRunner
from workers.engine.quant import SCHEMES
from workers.engine.quant.calibration import Calibration, read_calibration
from workers.engine.quant.compressed_tensors import Fp8Static
from workers.engine.runner import Runner
from workers.engine.schemes import check_input_scales, set_input_scales, use_scheme
from workers.engine.selfcheck import verify_invariance
from workers.engine.sizes import check_gpu_sizes, check_sizes
from workers.engine.weights import load_weights

log = logging.getLogger(__name__)

CPU_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
"""Schemes of the CPU → the type of the products. A quantized checkpoint is dequantized to it."""

CALIBRATION = "calibration.json"
"""Beside the weights of a full-precision snapshot it makes `fp8s` possible."""

Report = Callable[[str], None]
"""Called with one line of progress for a person."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What an engine runs on. `memory`, `compiles` and `clock` are None on the CPU."""

    runner: AnyRunner
    info: EngineInfo
    model_config: GemmaConfig
    memory: Memory | None = None
    compiles: CompileCounter | None = None
    clock: Clock | None = None


def load(config: EngineConfig, report: Report | None) -> Loaded:
    """Read the snapshot, check the machine, fix the fingerprint. LoadError for what no retry can cure."""
    return _load_cpu(config, report) if config.device == "cpu" else _load_cuda(config, report)


def _load_cpu(config: EngineConfig, report: Report | None) -> Loaded:
    started = time.monotonic()
    scheme = cpu_scheme(config.quant)
    if config.threads:  # else the library's choice: the cores that the process may use, or OMP_NUM_THREADS
        torch.set_num_threads(config.threads)
    facts = model_config(Path(config.model.snapshot_dir))
    check_sizes(facts, Path(config.model.snapshot_dir))
    dtype = CPU_DTYPES[scheme]
    model = GemmaModel(facts, dtype)
    load_weights(model, Path(config.model.snapshot_dir), percent_reporter(report))
    rule, invariant = verify_invariance(model.product_shapes(), facts.hidden_size, model.head_dims(), dtype)
    info = EngineInfo(
        fingerprint=_fixed(score_facts(config.model, scheme, rule)),
        scheme=scheme,
        batch_invariant=invariant,
        device_name=cpu_name(),
        compute_capability=None,
        token_budget=config.token_budget,
        max_tokens=config.max_tokens,
        vocab_size=facts.vocab_size,
        versions=versions(),
        load_s=time.monotonic() - started,
    )
    return Loaded(Runner(model, rule), info, facts)


def cpu_scheme(quant: str) -> str:
    """The scheme that `quant` stands for on the CPU."""
    scheme = "f32" if quant == "auto" else quant
    if scheme not in CPU_DTYPES:
        raise LoadError(f"scheme {scheme!r} is not supported on cpu: only {', '.join(CPU_DTYPES)} are")
    return scheme


def _load_cuda(config: EngineConfig, report: Report | None) -> Loaded:
    started = time.monotonic()
    directory = Path(config.model.snapshot_dir)
    facts = model_config(directory)
    check_sizes(facts, directory)
    card = open_card(config.device)
    compiles = CompileCounter()
    compiles.listen()
    scales = Scales.of(directory)
    scheme = choose_scheme(
        config.quant, card, has_scales=scales.present, bf16_bytes=weight_bytes(empty_model(facts, "bf16"))
    )
    if report is not None:
        report(f"loading in {scheme} on {card.name}")
    model = empty_model(facts, scheme)
    check_gpu_sizes(facts, model, scheme)
    check_memory(card, weight_bytes(model), _pass_bytes(facts, config.token_budget))
    memory = Memory(CudaAllocator(card.device))
    memory.loading()
    materialize(model, card.device)
    load_weights(model, directory, percent_reporter(report))
    if scheme == "fp8s":
        if scales.calibration is not None:
            set_input_scales(model, scales.calibration)
        check_input_scales(model)
    memory.loaded()
    digest = scales.calibration.digest if scales.calibration is not None and scheme == "fp8s" else None
    info = EngineInfo(
        fingerprint=_fixed(cuda_facts(config.model, scheme, card, digest)),
        scheme=scheme,
        batch_invariant=scheme != "fp8",
        device_name=card.name,
        compute_capability=f"{card.capability[0]}.{card.capability[1]}",
        token_budget=config.token_budget,
        max_tokens=config.max_tokens,
        vocab_size=facts.vocab_size,
        versions=versions() | {"cuda": torch.version.cuda, "triton": _installed("triton")},
        load_s=time.monotonic() - started,
    )
    return Loaded(_cuda_runner(model), info, facts, memory, compiles, CudaClock())


def _cuda_runner(model: GemmaModel) -> AnyRunner:
    from workers.engine.cuda_runner import CudaRunner  # needs Triton

    runner: AnyRunner = CudaRunner(model, RowRule())
    return runner


@dataclass(frozen=True, slots=True)
class Scales:
    """Scales of inputs for `fp8s`: stored in the snapshot, or in a calibration beside full-precision weights."""

    stored: bool
    calibration: Calibration | None = None

    @classmethod
    def of(cls, directory: Path) -> "Scales":
        """LoadError for a calibration that cannot be read or belongs to other weights."""
        if Fp8Static.from_json(read_config(directory)) is not None:
            return cls(stored=True)
        path = directory / CALIBRATION
        if not path.is_file():
            return cls(stored=False)
        from workers.engine.export import weights_digest  # takes half a second, and no other start needs it

        calibration = read_calibration(path)
        if calibration.weights_digest != weights_digest(directory):
            raise LoadError(f"{path} was made for other weights than those beside it")
        return cls(stored=False, calibration=calibration)

    @property
    def present(self) -> bool:
        """Whether there are any."""
        return self.stored or self.calibration is not None


def empty_model(facts: GemmaConfig, scheme: str) -> GemmaModel:
    """The model in a scheme of the GPU, without memory: shapes and types alone."""
    # Half the bytes of the stream that every layer reads and writes twice. Its rounding, that of the reference in bf16,
    # is far below that of fp8 codes.
    residual = torch.bfloat16 if scheme.startswith("fp8") else torch.float32
    with torch.device("meta"):
        model = GemmaModel(facts, torch.bfloat16, residual)
        if scheme in SCHEMES:
            use_scheme(model, scheme)
    return model


def materialize(model: nn.Module, device: torch.device) -> None:
    """Give an empty model its memory, nothing twice. Buffers of floats are NaN until they are set."""
    model.to_empty(device=device)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.fill_(float("nan"))


def weight_bytes(model: nn.Module) -> int:
    """What parameters and buffers take."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _pass_bytes(facts: GemmaConfig, rows: int) -> int:
    widths = [layout.width for layout in facts.layouts.values()]
    return pass_bytes(rows, facts.hidden_size, facts.intermediate_size, widths)


def _fixed(facts: dict[str, str | int | None]) -> str:
    """The fingerprint; the log says what it stands for."""
    found = fingerprint(facts)
    log.info("fingerprint %s = %s", found, facts)
    return found


def percent_reporter(report: Report | None) -> Callable[[int, int], None] | None:
    """Byte counts as lines for a person, one per ten percent."""
    if report is None:
        return None
    last = -1

    def loaded(done: int, total: int) -> None:
        nonlocal last
        tenth = 10 * done // total
        if tenth != last:
            last = tenth
            report(f"loading weights: {10 * tenth} % of {total / 1e6:.0f} MB")

    return loaded


def versions() -> dict[str, str | None]:
    """What computes, by name."""
    return {
        "spinf_serve": __version__,
        "torch": torch.__version__,
        "cuda": None,
        "transformers": _installed("transformers"),
        "python": platform.python_version(),
    }


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
