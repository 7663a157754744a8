"""What Linux tells about the processor."""

from pathlib import Path


def cpuinfo(key: str) -> str:
    """Return the first value of ``key`` in /proc/cpuinfo, empty where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def cpu_flags() -> frozenset[str]:
    """Return the instruction sets and features it has, as Linux names them."""
    return frozenset(cpuinfo("flags").split())
