"""What the driver's answers mean for a start. No GPU, no torch."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from spinf_serve import gpus
from spinf_serve.gpus import Driver, compiler_refusal, machine_refusal, refusal, torch_cuda

HOPPER = Driver((13, 0), 0, ((9, 0), (7, 5)))


@pytest.mark.parametrize(
    ("device", "driver", "built_for", "reason"),
    [
        ("cuda:0", HOPPER, None, "torch is built without CUDA"),
        ("cuda:0", Driver(), (13, 0), "no NVIDIA driver is installed here (libcuda.so.1 is not found)"),
        ("cuda:0", Driver((12, 8), 0, ((9, 0),)), (13, 0), "it runs CUDA 12.8 at most, and torch needs 13.0"),
        ("cuda:0", Driver((13, 0), 803), (13, 0), "do not match (error 803)"),
        ("cuda:0", Driver((13, 0), 100), (13, 0), "shows no GPU to this process; see CUDA_VISIBLE_DEVICES"),
        ("cuda:0", Driver((13, 0), 0, ()), (13, 0), "shows no GPU to this process"),
        ("cuda:2", HOPPER, (13, 0), "only 2 GPU(s) can be seen here"),
        ("cuda:1", HOPPER, (13, 0), "compute capability 7.5 is not supported: 8.0 (Ampere) or newer"),
    ],
)
def test_refusals_name_device_and_reason(
    device: str, driver: Driver, built_for: tuple[int, int] | None, reason: str
) -> None:
    said = refusal(device, driver, built_for)
    assert said is not None
    assert said.startswith(f"--device {device}: ")
    assert reason in said


@pytest.mark.parametrize(
    ("device", "driver", "built_for"),
    [
        ("cuda:0", HOPPER, (13, 0)),
        ("cuda:0", HOPPER, (13, 2)),  # a driver runs every build of its major version
        ("cuda:0", HOPPER, (12, 6)),
        ("cuda:0", Driver((13, 0), 802), (13, 0)),  # not ready yet: the engine tries, and may be started again
    ],
)
def test_what_may_work_is_not_refused(device: str, driver: Driver, built_for: tuple[int, int]) -> None:
    assert refusal(device, driver, built_for) is None


def test_the_cpu_asks_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "ask_driver", lambda: pytest.fail("asked"))
    assert machine_refusal("cpu") is None


def test_a_driver_that_gives_no_answer_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(*_arguments: object, **_more: object) -> None:
        raise subprocess.TimeoutExpired("python", 60)

    monkeypatch.setattr(subprocess, "run", hangs)
    monkeypatch.setattr(gpus, "compiler_refusal", lambda: None)
    assert machine_refusal("cuda:0") is None


def test_asking_in_a_process_of_its_own_gives_the_same() -> None:
    answer = subprocess.run([sys.executable, "-P", "-m", "spinf_serve.gpus"], capture_output=True, check=True)
    assert json.loads(answer.stdout).keys() == {"cuda", "status", "capabilities"}
    assert gpus.ask_driver() == gpus.read_driver()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\ngit_version = 'x'\n", (13, 0)),
        ("cuda = '12.8'\n", (12, 8)),
        ("cuda: Optional[str] = None\n", None),
        ("", None),
    ],
)
def test_the_cuda_version_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, found: tuple[int, int] | None
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text(text)
    monkeypatch.setattr(gpus, "find_spec", lambda _name: type("Spec", (), {"origin": str(tmp_path / "torch/x.py")}))
    assert torch_cuda() == found


# The compiler


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_a_compiler_that_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", str(script(tmp_path / "cc", "exit 0")))
    assert compiler_refusal() is None


def test_an_empty_cc_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton reads it as a compiler without a name, and the first kernel would fail."""
    monkeypatch.setenv("CC", "")
    assert compiler_refusal() == "CC is set but empty, and Triton takes it for the C compiler: unset it"


def test_no_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    said = compiler_refusal() or ""
    assert said.startswith("no C compiler is found")
    assert "apt-get install gcc libc6-dev python3-dev" in said


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("echo 'launcher.c:1: fatal error: Python.h: No such file' >&2; exit 1", "fatal error: Python.h"),
        ("exit 3", "no reason given"),
    ],
)
def test_a_compiler_without_headers_is_quoted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, reason: str
) -> None:
    monkeypatch.setenv("CC", str(script(tmp_path / "cc", text)))
    said = compiler_refusal() or ""
    assert reason in said
    assert "install gcc" in said


def test_a_compiler_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", str(tmp_path / "nowhere"))
    assert "cannot be run" in (compiler_refusal() or "")


def test_no_room_for_what_the_compiler_writes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", str(script(tmp_path / "cc", "exit 0")))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        said = compiler_refusal() or ""
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert said.startswith("temporary files cannot be written")
    assert said.endswith("set TMPDIR")


def test_a_machine_is_asked_for_a_compiler_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "ask_driver", lambda: HOPPER)
    monkeypatch.setattr(gpus, "torch_cuda", lambda: (13, 0))
    monkeypatch.setattr(gpus, "compiler_refusal", lambda: "no compiler")
    assert machine_refusal("cuda:0") == "no compiler"
    assert machine_refusal("cpu") is None
