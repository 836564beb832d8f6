"""What the processor says it is, asked without torch."""

from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


def is_intel(cpuinfo: Path = _CPUINFO) -> bool:
    """Whether the first processor names Intel as its vendor. False where the kernel does not tell."""
    try:
        with cpuinfo.open(encoding="utf-8") as lines:
            vendor = next((line for line in lines if line.startswith("vendor_id")), "")
    except OSError:
        return False
    return vendor.partition(":")[2].strip() == "GenuineIntel"
