"""Whether this machine can serve on a GPU, without torch: what cannot is refused at once, before any download.

The driver is asked in a process of its own, so that the supervisor holds no handle of a GPU. `refusal` names what no
retry cures; a driver that is only not ready yet is left to the engine, whose start may be tried again.
"""

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

LIBRARY = "libcuda.so.1"
LEAST_CAPABILITY = (8, 0)
"""Ampere: the first with bf16 tensor cores."""

_LAUNCHER = "#include <Python.h>\n#include <stdlib.h>\nint main(void) { return 0; }\n"
_PACKAGES = "gcc, the C library's headers and Python's (Debian: apt-get install gcc libc6-dev python3-dev)"
_ASK_S = 60.0  # a driver that has to wake up many GPUs takes seconds
_NO_DEVICE = (100, 101)  # CUDA_ERROR_NO_DEVICE, _INVALID_DEVICE
_MISMATCHES = (803, 804)  # CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, _COMPAT_NOT_SUPPORTED_ON_DEVICE
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


@dataclass(frozen=True, slots=True)
class Driver:
    """What the driver says of itself and its GPUs.

    cuda          the newest CUDA version that it runs, (0, 0) without a driver
    status        what its start returned, 0 = fine
    capabilities  (major, minor) of every GPU that this process may use
    """

    cuda: tuple[int, int] = (0, 0)
    status: int = 0
    capabilities: tuple[tuple[int, int], ...] = ()


def read_driver() -> Driver:
    """Ask the driver in this process."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        return Driver()
    version, count, value = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    cuda = version.value // 1000, version.value % 1000 // 10
    status = library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count))
    if status:
        return Driver(cuda, status)
    capabilities = []
    for index in range(count.value):
        pair = []
        for attribute in (_MAJOR, _MINOR):
            library.cuDeviceGetAttribute(ctypes.byref(value), attribute, index)
            pair.append(value.value)
        capabilities.append((pair[0], pair[1]))
    return Driver(cuda, 0, tuple(capabilities))


def ask_driver() -> Driver | None:
    """The same from a process of its own; None where it gave no answer."""
    command = [sys.executable, "-P", "-m", __name__]
    try:
        answer = subprocess.run(command, capture_output=True, timeout=_ASK_S, check=True, stdin=subprocess.DEVNULL)
        found = json.loads(answer.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    pairs = tuple((major, minor) for major, minor in found["capabilities"])
    return Driver(tuple(found["cuda"]), found["status"], pairs)


def torch_cuda() -> tuple[int, int] | None:
    """The CUDA version that the installed torch was built for, read from its files; None where it names none."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"^cuda\b[^=\n]*= '(\d+)\.(\d+)'", text, re.MULTILINE)
    return (int(found[1]), int(found[2])) if found else None


def refusal(device: str, driver: Driver, built_for: tuple[int, int] | None) -> str | None:
    """Why `device` (cuda:N) cannot be used and no retry helps, in one sentence; None where that is not so."""
    where, index = f"--device {device}", int(device.partition(":")[2] or 0)
    if built_for is None:
        return f"{where}: the installed torch is built without CUDA: pip install 'spinf-serve[server]'"
    if driver.cuda == (0, 0):
        return f"{where}: no NVIDIA driver is installed here ({LIBRARY} is not found); without a GPU: --device cpu"
    if driver.cuda[0] < built_for[0]:
        return (
            f"{where}: the NVIDIA driver is too old: it runs CUDA {_dotted(driver.cuda)} at most, and torch needs "
            f"{built_for[0]}.0; install a newer driver, or the build of torch for CUDA {driver.cuda[0]}"
        )
    if driver.status in _MISMATCHES:
        return f"{where}: the NVIDIA driver and its library do not match (error {driver.status}): reboot"
    if driver.status in _NO_DEVICE or (not driver.status and not driver.capabilities):
        return f"{where}: the NVIDIA driver shows no GPU to this process; see CUDA_VISIBLE_DEVICES, or --device cpu"
    if driver.status:
        return None
    if index >= len(driver.capabilities):
        return f"{where}: only {len(driver.capabilities)} GPU(s) can be seen here, counted from cuda:0"
    if driver.capabilities[index] < LEAST_CAPABILITY:
        return (
            f"{where}: compute capability {_dotted(driver.capabilities[index])} is not supported: "
            f"{_dotted(LEAST_CAPABILITY)} (Ampere) or newer is needed"
        )
    return None


def compiler_refusal() -> str | None:
    """Why Triton cannot build the launchers of its kernels, in one sentence; None where a trial succeeds."""
    compiler = os.environ.get("CC", shutil.which("gcc") or shutil.which("clang"))
    if compiler == "":
        return "CC is set but empty, and Triton takes it for the C compiler: unset it"
    if compiler is None:
        return f"no C compiler is found (gcc, clang, or CC), which Triton needs: install {_PACKAGES}"
    try:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "launcher.c")
            source.write_text(_LAUNCHER, encoding="utf-8")
            return _trial(compiler, source)
    except OSError as error:  # a full disk, or no directory at all
        return f"temporary files cannot be written, and Triton compiles there ({error}): set TMPDIR"


def _trial(compiler: str, source: Path) -> str | None:
    """Why a launcher cannot be compiled, beside its source."""
    command = [compiler, str(source), "-shared", "-fPIC", f"-I{_headers()}", "-o", str(source.with_suffix(".so"))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError) as error:
        return f"the C compiler {compiler} cannot be run ({error}): install {_PACKAGES}"
    if not done.returncode:
        return None
    said = next((line.strip() for line in done.stderr.splitlines() if "error" in line), "no reason given")
    return f"{compiler} cannot compile Triton's launchers ({said[:200]}): install {_PACKAGES}"


def _headers() -> str:
    """Where Triton looks for Python.h."""
    scheme = sysconfig.get_default_scheme()
    return sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]


def machine_refusal(device: str) -> str | None:
    """Why this machine cannot serve on `device`; None for the CPU. A driver that gives no answer refuses nothing."""
    if device == "cpu":
        return None
    driver = ask_driver()
    reason = None if driver is None else refusal(device, driver, torch_cuda())
    return reason or compiler_refusal()


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


if __name__ == "__main__":
    print(json.dumps(asdict(read_driver())))
