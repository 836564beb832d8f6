"""The GPU at start: is everything there that a pass needs, and which scheme does the checkpoint get on this card.

A refusal that no retry cures is a `LoadError`, one sentence each. What may pass (a driver that is not ready yet, memory
that another process still holds) is a `NotNow`: the supervisor tries again.
"""

import importlib
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from spinf_serve.gpus import Driver, compiler_refusal, read_driver, refusal
from workers.engine.errors import LoadError, NotNow
from workers.engine.failures import is_out_of_memory, is_unwritable

FP8_CAPABILITY = (8, 9)
"""The first compute capability with fp8 tensor cores."""

MARGIN = 4 << 30
"""Bytes beside the weights that the automatic choice keeps for passes: without them bf16 does not count as fitting."""

_GIB = 1 << 30

_KERNEL_BYTES = 1 << 20
"""More than one compiled kernel takes, with all that Triton keeps beside it."""


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU. Bytes of its memory: all, and free at the time of the look."""

    index: int
    name: str
    capability: tuple[int, int]
    processors: int
    total: int
    free: int

    @property
    def device(self) -> torch.device:
        """As torch names it."""
        return torch.device("cuda", self.index)

    @property
    def has_fp8(self) -> bool:
        """Whether it multiplies fp8."""
        return self.capability >= FP8_CAPABILITY


def check_driver(device: str, driver: Driver) -> None:
    """LoadError where no GPU can be used, NotNow where the driver is not ready yet."""
    built = torch.version.cuda
    version = tuple(map(int, built.split(".")[:2])) if built else None
    if reason := refusal(device, driver, version):  # type: ignore[arg-type]  # two numbers
        raise LoadError(reason)
    if driver.status:
        raise NotNow(f"--device {device}: the NVIDIA driver is not ready (error {driver.status})")


def check_triton() -> None:
    """LoadError where kernels cannot be compiled: no Triton, no C compiler for its launchers, no room in the cache."""
    try:
        importlib.import_module("triton")
    except ImportError as error:
        raise LoadError(f"Triton cannot be imported ({error}): pip install 'spinf-serve[server]'") from None
    if reason := compiler_refusal():
        raise LoadError(reason)
    _check_cache()


def _check_cache() -> None:
    """LoadError where compiled kernels cannot be kept.

    A full one that holds some is let pass: it may hold all that are needed, and what is not there the warm-up finds.
    """
    path = kernel_cache()
    error = _write_error(path)
    if error is not None and not (is_unwritable(error) and _holds_any(path)):
        raise _no_room(path, error)


def kernel_cache() -> Path:
    """Where Triton keeps compiled kernels: its own choice."""
    from triton import knobs

    return Path(knobs.cache.dir)


def compilation_refusal(error: OSError) -> LoadError:
    """What it means that a file of a compilation found no room: which of its two directories is full."""
    for path in (kernel_cache(), Path(tempfile.gettempdir())):
        if found := _write_error(path):
            return _no_room(path, found)
    return _no_room(kernel_cache(), error)


def _write_error(path: Path) -> OSError | None:
    """Why a kernel cannot be written into a directory, which is made; None where it can."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(os.urandom(_KERNEL_BYTES))  # not zeros: some file systems keep none of those
            file.flush()
            os.fsync(file.fileno())  # where room is taken late, this is where it lacks
    except OSError as error:
        return error
    return None


def _holds_any(path: Path) -> bool:
    return path.is_dir() and any(path.iterdir())


def _no_room(path: Path, error: OSError) -> LoadError:
    variable = "TRITON_CACHE_DIR" if path == kernel_cache() else "TMPDIR"
    return LoadError(f"compiled kernels cannot be kept in {path} ({error.strerror or error}): set {variable}")


def open_card(device: str) -> Card:
    """The card behind `device` (cuda:N), once driver and compiler are checked; torch's default device afterwards.

    LoadError, NotNow.
    """
    check_driver(device, read_driver())
    check_triton()
    index = int(device.partition(":")[2] or 0)
    try:
        torch.cuda.set_device(index)  # the context is made here: for want of memory, or of a card, it may fail
        facts = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError as error:
        said = str(error).partition("\n")[0]
        reason = "no memory is left for a start, another process holds it" if is_out_of_memory(error) else said
        raise NotNow(f"--device {device} cannot be used now: {reason}") from error
    return Card(index, facts.name, (facts.major, facts.minor), facts.multi_processor_count, total, free)


def check_fp8(scheme: str, card: Card) -> None:
    """LoadError for an fp8 scheme on a card that does not multiply fp8."""
    if scheme.startswith("fp8") and not card.has_fp8:
        raise LoadError(
            f"--quant {scheme} needs compute capability 8.9 or newer, and {card.name} has "
            f"{card.capability[0]}.{card.capability[1]}: leave the scheme to auto, or choose w8a16, w8a8 or bf16"
        )


def choose_scheme(quant: str, card: Card, *, has_scales: bool, bf16_bytes: int) -> str:
    """The scheme that `quant` stands for on this card.

    auto: fp8s where the snapshot has scales of inputs and the card fp8; else bf16 where the weights (`bf16_bytes`) and
    4 GiB fit the card; else the best of 8 bits. What others hold of the card does not count: an engine that starts
    again beside them must not answer in another scheme than the one before.
    """
    if quant != "auto":
        check_fp8(quant, card)
        if quant == "fp8s" and not has_scales:
            raise LoadError("--quant fp8s needs a calibrated checkpoint, and this one has no scales of inputs")
        return quant
    if has_scales and card.has_fp8:
        return "fp8s"
    if bf16_bytes + MARGIN <= card.total:
        return "bf16"
    return "fp8row" if card.has_fp8 else "w8a16"


def check_memory(card: Card, weights: int, pass_bytes: int) -> None:
    """Weights and one pass must fit. LoadError: the card is too small; NotNow: others hold its memory."""
    needed = weights + pass_bytes
    parts = f"{_gib(weights)} for the weights and about {_gib(pass_bytes)} for a pass (see --token-budget, --quant)"
    if needed > card.total:
        raise LoadError(f"the model needs {_gib(needed)}, {parts}, and {card.name} has {_gib(card.total)}")
    if needed > card.free:
        raise NotNow(
            f"the model needs {_gib(needed)}, {parts}, and only {_gib(card.free)} of {_gib(card.total)} are free on "
            f"{card.name}: another process holds the rest"
        )


def pass_bytes(rows: int, hidden: int, intermediate: int, head_widths: Sequence[int]) -> int:
    """A cautious estimate of what a pass of `rows` rows holds at once beside the weights.

    hidden K and intermediate I; head_widths: numbers in a row of q, k and v of each kind of layer. Per row: the
    residual stream in float32, gate and up and what follows from them in bf16, q, k, v before and after the rotation.
    """
    per_row = 4 * hidden + 2 * 2 * hidden + 2 * 3 * intermediate + 2 * 2 * max(head_widths, default=0)
    return rows * per_row + _GIB // 2  # context, workspaces of the libraries, head


def _gib(size: int) -> str:
    return f"{size / _GIB:.1f} GiB"
