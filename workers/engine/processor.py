"""What the processor says it is, asked without torch."""

from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


def cpu_field(name: str, cpuinfo: Path = _CPUINFO) -> str | None:
    """What the kernel tells under this name of the first processor; None where it does not."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    values = (line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == name)
    return next(values, None)


def is_intel(cpuinfo: Path = _CPUINFO) -> bool:
    """Whether the vendor is Intel. False where the kernel does not tell."""
    return cpu_field("vendor_id", cpuinfo) == "GenuineIntel"
