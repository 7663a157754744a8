"""Read the end of a service's log, and keep logs bounded."""

import os
from pathlib import Path

MAX_LOG = 16 << 20
"""Bytes after which a log is cut to its newest part."""
_KEEP = 1 << 20
_TAIL = 64 << 10


def tail(path: Path, lines: int, *, start: int = 0) -> list[str]:
    """Return the last ``lines`` lines written after byte ``start``."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start if start <= size else 0, size - _TAIL))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return text.splitlines()[-lines:]


def refusal(path: Path, *, start: int = 0) -> str | None:
    """Return the sentence of the last ``error: ...`` line, None where there is none."""
    for line in reversed(tail(path, 200, start=start)):
        if line.startswith("error: "):
            return line.removeprefix("error: ")
    return None


def shorten(folder: Path) -> None:
    """Cut logs that grew too long to their newest part; writers append, so none is disturbed."""
    for path in folder.glob("*.log"):
        if path.stat().st_size <= MAX_LOG:
            continue
        with path.open("r+b") as file:
            file.seek(-_KEEP, os.SEEK_END)
            newest = file.read().partition(b"\n")[2]
            file.seek(0)
            file.write(newest)
            file.truncate()
