"""Start checks and the choice of the scheme, on made-up cards; and the way of a GPU's load, on the CPU."""

import contextlib
import errno
import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spinf_serve.gpus import Driver
from tests.engine.fakes import FakeAllocator
from tests.engine.quant.support import bf16_checkpoint, exported, scheme_model, write_calibration
from tests.engine.support import engine_config, make_plan, random_jobs, score
from workers.engine import device, fingerprint, load, sweep
from workers.engine.compiles import CompileCounter
from workers.engine.device import Card, check_driver, check_memory, check_triton, choose_scheme, pass_bytes
from workers.engine.engine import ScoringEngine
from workers.engine.errors import LoadError, NotNow
from workers.engine.kernels.products import RowRule
from workers.engine.memory import Memory
from workers.engine.runner import Runner

GIB = 1 << 30
HOPPER = Card(0, "NVIDIA H200", (9, 0), 132, 140 * GIB, 139 * GIB)
ADA = replace(HOPPER, name="NVIDIA L4", capability=(8, 9), total=22 * GIB, free=22 * GIB)
AMPERE = replace(HOPPER, name="NVIDIA A10", capability=(8, 6), total=22 * GIB, free=22 * GIB)
BIG, SMALL = 24 * GIB, 2 * GIB


@pytest.mark.parametrize(
    ("card", "has_scales", "bf16_bytes", "scheme"),
    [
        (HOPPER, True, BIG, "fp8s"),
        (HOPPER, False, BIG, "bf16"),
        (ADA, True, SMALL, "fp8s"),
        (ADA, False, SMALL, "bf16"),
        (ADA, False, 18 * GIB, "bf16"),  # 22 GiB, to the byte
        (ADA, False, 18 * GIB + 1, "fp8row"),
        (AMPERE, True, SMALL, "bf16"),  # no fp8 in the tensor cores
        (AMPERE, True, BIG, "w8a16"),
        (AMPERE, False, BIG, "w8a16"),
        (replace(HOPPER, free=20 * GIB), False, BIG, "bf16"),  # who else is on the card changes no score
    ],
)
def test_the_automatic_choice(card: Card, has_scales: bool, bf16_bytes: int, scheme: str) -> None:
    assert choose_scheme("auto", card, has_scales=has_scales, bf16_bytes=bf16_bytes) == scheme


@pytest.mark.parametrize("quant", ["fp8s", "fp8", "fp8row"])
def test_fp8_needs_the_card_for_it(quant: str) -> None:
    assert choose_scheme(quant, ADA, has_scales=True, bf16_bytes=BIG) == quant
    with pytest.raises(LoadError, match=r"needs compute capability 8\.9 or newer, and NVIDIA A10 has 8\.6"):
        choose_scheme(quant, AMPERE, has_scales=True, bf16_bytes=BIG)


def test_fp8s_needs_scales() -> None:
    with pytest.raises(LoadError, match="needs a calibrated checkpoint"):
        choose_scheme("fp8s", HOPPER, has_scales=False, bf16_bytes=SMALL)


def test_memory_that_can_never_do_is_told_from_memory_that_others_hold() -> None:
    check_memory(ADA, 12 * GIB, 10 * GIB)
    with pytest.raises(LoadError, match=r"needs 24\.0 GiB.* NVIDIA L4 has 22\.0 GiB"):
        check_memory(ADA, 14 * GIB, 10 * GIB)
    with pytest.raises(NotNow, match=r"only 5\.0 GiB of 22\.0 GiB are free on NVIDIA L4: another process"):
        check_memory(replace(ADA, free=5 * GIB), 12 * GIB, 2 * GIB)


def test_a_pass_of_the_12b_is_estimated_within_reason() -> None:
    assert 2 * GIB < pass_bytes(16_384, 3840, 15_360, [8192, 8704]) < 4 * GIB


@pytest.mark.parametrize(
    ("driver", "error"),
    [(Driver(), LoadError), (Driver((13, 0), 0, ()), LoadError), (Driver((13, 0), 802), NotNow)],
)
def test_a_driver_that_is_not_ready_may_be_tried_again(driver: Driver, error: type[Exception]) -> None:
    with pytest.raises(error, match="--device cuda:0"):
        check_driver("cuda:0", driver)
    assert issubclass(LoadError, RuntimeError) is False


def test_no_gpu_is_a_refusal_that_names_the_device(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "read_driver", Driver)
    with pytest.raises(LoadError, match="--device cuda:0: no NVIDIA driver"):
        ScoringEngine.load(engine_config(tiny_checkpoint, device="cuda:0"))


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'", "no memory is left for a start, another"),
        ("CUDA-capable device(s) is/are busy or unavailable\nSearch", "CUDA-capable device.* busy or unavailable$"),
    ],
)
def test_a_card_without_room_for_a_context_may_be_tried_again(
    monkeypatch: pytest.MonkeyPatch, error: str, reason: str
) -> None:
    def fails(_index: int) -> None:
        raise torch.AcceleratorError(error)

    monkeypatch.setattr(device, "check_driver", lambda *_: None)
    monkeypatch.setattr(device, "check_triton", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_device", fails)
    with pytest.raises(NotNow, match=f"--device cuda:1 cannot be used now: {reason}") as refused:
        device.open_card("cuda:1")
    assert "\n" not in str(refused.value)


# Triton


def test_triton_is_ready_when_a_compiler_and_a_cache_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "made" / "here"))
    monkeypatch.setattr(device, "compiler_refusal", lambda: None)
    check_triton()
    assert (tmp_path / "made" / "here").is_dir()
    monkeypatch.setattr(device, "compiler_refusal", lambda: "no C compiler")
    with pytest.raises(LoadError, match="no C compiler"):
        check_triton()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no directory that nobody can write")
def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(device, "compiler_refusal", lambda: None)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/proc/self/cache")  # not even root makes a directory there
    with pytest.raises(LoadError, match=r"cannot be kept in /proc/self/cache .* set TRITON_CACHE_DIR"):
        check_triton()


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The kernel refuses what goes beyond, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_cache_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes are written to find out. What holds kernels already may be all that is needed."""
    pytest.importorskip("triton")
    monkeypatch.setattr(device, "compiler_refusal", lambda: None)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    with files_of_at_most(64 << 10):
        with pytest.raises(LoadError, match=r"cannot be kept in .*/cache \(File too large\): set TRITON_CACHE_DIR$"):
            check_triton()
        assert not any((tmp_path / "cache").iterdir())
        (tmp_path / "cache" / "ABCDEF").mkdir()
        check_triton()


def test_a_full_disk_is_refused_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(device, "compiler_refusal", lambda: None)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(LoadError, match="No space left on device"):
        check_triton()


def test_triton_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(device.importlib, "import_module", missing)
    with pytest.raises(LoadError, match="Triton cannot be imported"):
        check_triton()


# The load, with the CPU in the place of the card


class CpuCard(Card):
    """A card whose device is the CPU: linears then run in their plain form."""

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> CpuCard:
    found = CpuCard(0, "NVIDIA Test", (9, 0), 132, 140 * GIB, 139 * GIB)
    monkeypatch.setattr(load, "open_card", lambda _device: found)
    monkeypatch.setattr(CompileCounter, "listen", lambda self: None)
    monkeypatch.setattr(load, "CudaAllocator", lambda _device: FakeAllocator(held=7))
    monkeypatch.setattr(load, "CudaClock", lambda: None)
    monkeypatch.setattr(load, "_cuda_runner", lambda model: Runner(model, RowRule()))
    return found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bf16_checkpoint(tmp_path_factory.mktemp("load") / "snapshot")


@pytest.fixture
def loaded(card: CpuCard, checkpoint: Path) -> Callable[..., ScoringEngine]:
    def make(snapshot: Path = checkpoint, **settings: Any) -> ScoringEngine:
        return ScoringEngine.load(engine_config(snapshot, device="cuda:0", **settings))

    return make


PLAN = make_plan(random_jobs(3, 800, [40, 5], 4))[0]


@pytest.mark.parametrize("scheme", ["fp8", "fp8row", "w8a16", "w8a8"])
def test_a_scheme_is_loaded_and_says_what_it_is(
    loaded: Callable[..., ScoringEngine], checkpoint: Path, scheme: str
) -> None:
    engine = loaded(quant=scheme)
    assert (engine.info.scheme, engine.info.batch_invariant) == (scheme, scheme != "fp8")
    assert (engine.info.device_name, engine.info.compute_capability) == ("NVIDIA Test", "9.0")
    assert engine.info.versions["cuda"] == torch.version.cuda
    expected = ScoringEngine.load(engine_config(checkpoint, quant="bf16"))
    residual = torch.bfloat16 if scheme.startswith("fp8") else torch.float32
    model = scheme_model(checkpoint, scheme, dtype=torch.bfloat16, residual=residual)
    expected._runner = Runner(model, RowRule())
    assert np.array_equal(score(engine, PLAN).logprobs, score(expected, PLAN).logprobs)
    assert engine.stats()["weights_bytes"] == 0, "what was held before the load is not the model's"


def test_bf16_is_the_choice_for_full_precision(loaded: Callable[..., ScoringEngine], checkpoint: Path) -> None:
    engine = loaded()
    assert engine.info.scheme == "bf16"
    expected = ScoringEngine.load(engine_config(checkpoint, quant="bf16"))
    assert np.array_equal(score(engine, PLAN).logprobs, score(expected, PLAN).logprobs)


def test_stored_scales_make_fp8s(loaded: Callable[..., ScoringEngine], checkpoint: Path, tmp_path: Path) -> None:
    static, calibration = exported(checkpoint, tmp_path / "static")
    engine = loaded(static)
    assert engine.info.scheme == "fp8s"
    expected = ScoringEngine.load(engine_config(checkpoint, quant="bf16"))
    model = scheme_model(checkpoint, "fp8s", calibration, torch.bfloat16, torch.bfloat16)
    expected._runner = Runner(model, RowRule())
    assert np.array_equal(score(engine, PLAN).logprobs, score(expected, PLAN).logprobs)


def test_a_calibration_beside_the_weights_makes_fp8s(
    loaded: Callable[..., ScoringEngine], checkpoint: Path, tmp_path: Path
) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in checkpoint.iterdir():
        (snapshot / path.name).write_bytes(path.read_bytes())
    plain = loaded(snapshot, quant="fp8row").info.fingerprint
    write_calibration(snapshot, snapshot / "calibration.json")
    engine = loaded(snapshot)
    assert engine.info.scheme == "fp8s"
    static, _ = exported(checkpoint, tmp_path / "static")
    assert np.array_equal(score(engine, PLAN).logprobs, score(loaded(static), PLAN).logprobs)
    assert loaded(snapshot, quant="fp8row").info.fingerprint == plain, "scales that are not used change no score"
    write_calibration(snapshot, snapshot / "calibration.json", {**amax_of(snapshot), "model.layers.0.mlp.up_proj": 9.0})
    assert loaded(snapshot).info.fingerprint != engine.info.fingerprint


def amax_of(snapshot: Path) -> dict[str, float]:
    from tests.engine.quant.support import some_amax

    return some_amax(snapshot)


def test_a_calibration_of_other_weights_is_refused(
    loaded: Callable[..., ScoringEngine], checkpoint: Path, tmp_path: Path
) -> None:
    other = bf16_checkpoint(tmp_path / "other", seed=99)
    write_calibration(checkpoint, other / "calibration.json")
    with pytest.raises(LoadError, match="other weights"):
        loaded(other)


def test_memory_is_asked_for_before_the_weights_are_read(
    loaded: Callable[..., ScoringEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = CpuCard(0, "NVIDIA Test", (9, 0), 132, 1 << 20, 1 << 20)
    monkeypatch.setattr(load, "open_card", lambda _device: small)
    monkeypatch.setattr(load, "load_weights", lambda *_arguments: pytest.fail("too late"))
    with pytest.raises(LoadError, match="NVIDIA Test has"):
        loaded(quant="bf16")


def config_with(snapshot: Path, directory: Path, **sizes: int) -> Path:
    """A snapshot of config.json alone, with other sizes."""
    directory.mkdir(exist_ok=True)
    config = json.loads((snapshot / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | sizes))
    return directory


FP8_SIZES = r"a product of \d+ by \d+, and fp8\w* needs multiples of 16: choose --quant w8a16, w8a8 or bf16"


@pytest.mark.parametrize(
    ("quant", "sizes", "reason"),
    [
        ("fp8row", {"intermediate_size": 104}, FP8_SIZES),
        ("fp8", {"hidden_size": 72}, FP8_SIZES),
        ("fp8s", {"head_dim": 22}, FP8_SIZES),
        ("w8a8", {"intermediate_size": (1 << 17) + 2}, "sums 131074 products, and w8a8 at most 131072"),
        ("bf16", {"head_dim": 514}, "heads of size 514: at most 512 is supported on a GPU"),
        ("w8a16", {"num_attention_heads": 65, "num_key_value_heads": 1}, "65 query heads on one .* on a GPU"),
    ],
)
def test_sizes_without_a_kernel_are_refused_before_memory_is_taken(
    loaded: Callable[..., ScoringEngine],
    card: CpuCard,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    quant: str,
    sizes: dict[str, int],
    reason: str,
) -> None:
    """The first pass would find out otherwise, and the supervisor would start the engine again and again."""
    pytest.importorskip("triton")
    snapshot = config_with(checkpoint, tmp_path / "odd", **sizes)
    monkeypatch.setattr(load, "check_sizes", lambda *_arguments: None)
    monkeypatch.setattr(load, "materialize", lambda *_arguments: pytest.fail("too late"))
    if quant == "fp8s":
        monkeypatch.setattr(load.Scales, "of", lambda _directory: load.Scales(stored=True))
    with pytest.raises(LoadError, match=reason) as refused:
        loaded(snapshot, quant=quant)
    assert "\n" not in str(refused.value)
    monkeypatch.setattr(sweep, "open_card", lambda _device: card)
    with pytest.raises(LoadError, match=reason):
        sweep.selfcheck(snapshot, "cuda:0", quant, 64)


def test_the_fingerprint_names_scheme_card_and_kernels(
    loaded: Callable[..., ScoringEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = {loaded(quant=scheme).info.fingerprint for scheme in ("bf16", "fp8row", "w8a16", "w8a8", "fp8")}
    assert len(seen) == 5
    again = loaded(quant="bf16", token_budget=50, threads=1).info.fingerprint
    assert again in seen
    for changed in ({"name": "NVIDIA Other"}, {"capability": (10, 0)}, {"processors": 114}):
        facts = {"name": "NVIDIA Test", "capability": (9, 0), "processors": 132, **changed}
        other = CpuCard(0, total=140 * GIB, free=139 * GIB, **facts)
        monkeypatch.setattr(load, "open_card", lambda _device, other=other: other)
        assert loaded(quant="bf16").info.fingerprint not in seen
    monkeypatch.undo()


def test_what_compiles_or_computes_otherwise_is_in_the_fingerprint(
    loaded: Callable[..., ScoringEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in fingerprint.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    seen = {loaded(quant="fp8row").info.fingerprint}
    for name in fingerprint.SETTINGS:
        with monkeypatch.context() as within:
            within.setenv(name, "0")
            seen.add(loaded(quant="fp8row").info.fingerprint)
    assert len(seen) == 1 + len(fingerprint.SETTINGS)
    with monkeypatch.context() as within:
        within.setenv("TRITON_CACHE_DIR", "/elsewhere")  # where things lie changes no score
        assert loaded(quant="fp8row").info.fingerprint in seen
    installed = fingerprint.metadata.version
    for package in ("nvidia-cublas", "triton"):
        with monkeypatch.context() as within:
            within.setattr(
                fingerprint.metadata,
                "version",
                lambda name, package=package: "99.0" if name == package else installed(name),
            )
            assert loaded(quant="fp8row").info.fingerprint not in seen, package


def test_the_sources_of_the_ops_are_in_the_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = fingerprint.kernel_sources()
    package = Path(fingerprint.kernels.__file__).parent
    shutil.copytree(package, tmp_path / "kernels")
    monkeypatch.setattr(fingerprint.kernels, "__file__", str(tmp_path / "kernels" / "__init__.py"))
    assert fingerprint.kernel_sources() == own
    for name in ("lm_head/kernel.py", "linear/library.py", "tree_attention/tiles.py"):
        with (tmp_path / "kernels" / name).open("a") as source:
            source.write("TILE = 1\n")
        changed = fingerprint.kernel_sources()
        assert changed != own
        own = changed


def test_progress_says_where_it_loads(card: CpuCard, checkpoint: Path) -> None:
    lines: list[str] = []
    ScoringEngine.load(engine_config(checkpoint, device="cuda:0"), on_progress=lines.append)
    assert lines[0] == "loading in bf16 on NVIDIA Test"
    assert "100 %" in lines[-1]


def test_an_empty_model_takes_no_memory_and_knows_its_size(checkpoint: Path) -> None:
    facts = load.model_config(checkpoint)
    plain = load.weight_bytes(load.empty_model(facts, "bf16"))
    fp8 = load.empty_model(facts, "fp8row")
    assert all(tensor.is_meta for tensor in (*fp8.parameters(), *fp8.buffers()))
    assert load.weight_bytes(fp8) < plain


def test_buffers_are_nan_until_they_are_set(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale that nobody gave is then seen: `check_input_scales` looks for it."""
    give_memory = torch.nn.Module.to_empty

    def zeroed(self: torch.nn.Module, *, device: torch.device) -> torch.nn.Module:
        give_memory(self, device=device)
        for buffer in self.buffers():
            buffer.zero_()
        return self

    monkeypatch.setattr(torch.nn.Module, "to_empty", zeroed)
    model = load.empty_model(load.model_config(checkpoint), "fp8s")
    load.materialize(model, torch.device("cpu"))
    buffers = list(model.buffers())
    assert buffers
    assert all(buffer.isnan().all() for buffer in buffers)
    with pytest.raises(LoadError, match="has no input_scale"):
        load.check_input_scales(model)


def test_memory_summary() -> None:
    allocator = FakeAllocator(held=3 << 30)
    memory = Memory(allocator)
    memory.loaded()
    allocator.most, allocator.cached = 5 << 30, 4 << 30
    assert memory.summary() == "memory: weights 3,072 MiB, a pass up to 2,048 MiB more, reserved 7,168 MiB"
