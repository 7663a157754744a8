"""How much memory this process may still take, and giving back what it holds for nothing."""

import ctypes
from pathlib import Path
from typing import Final

_MOUNT_V2 = "sys/fs/cgroup"
_MOUNT_V1 = "sys/fs/cgroup/memory"
_FILES_V2 = ("memory.max", "memory.current")
_FILES_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
_UNLIMITED: Final = 1 << 62


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes that can be taken without swapping or being killed for memory.

    The smallest of the machine's ``MemAvailable`` and what the memory limits of this
    process's control groups (v1 and v2, up to the root) leave, page cache counted as free.
    ``root`` is where proc and sys are found.
    """
    room = [_machine_room(root / "proc/meminfo")]
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            room += _group_room(root / _MOUNT_V2, group, _FILES_V2)
        elif "memory" in controllers.split(","):
            room += _group_room(root / _MOUNT_V1, group, _FILES_V1)
    return max(0, min(room))


def give_back_freed() -> None:
    """Return freed memory to the system; the C library keeps it, and loading frees a lot.

    Without glibc's ``malloc_trim`` nothing happens.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _machine_room(meminfo: Path) -> int:
    for line in _read(meminfo).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return _UNLIMITED


def _group_room(mount: Path, group: str, files: tuple[str, str]) -> list[int]:
    """Return what the group and each of its parents leaves, where there is a limit."""
    room = []
    relative = Path(group.lstrip("/"))
    for directory in (relative, *relative.parents):
        limit, usage = (_read(mount / directory / name).strip() for name in files)
        if limit.isdigit() and usage.isdigit():
            cache = _page_cache(mount / directory / "memory.stat")
            room.append(int(limit) - max(0, int(usage) - cache))
    return room


def _page_cache(stat: Path) -> int:
    """Return the bytes of file pages, which the kernel drops before it refuses memory."""
    rows = dict(line.split() for line in _read(stat).splitlines() if line.count(" ") == 1)
    names = ("active_file", "inactive_file")
    return sum(int(rows.get(f"total_{name}", rows.get(name, "0"))) for name in names)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
