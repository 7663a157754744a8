"""How much memory is left, read from a made-up proc and sys."""

from pathlib import Path

import numpy as np
import psutil

from shared.kv.memory import available_memory, give_back_freed

MIB = 1 << 20


def _write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _machine(root: Path, available_kib: int, cgroup: str) -> None:
    _write(root, "proc/meminfo", f"MemTotal: 99999999 kB\nMemAvailable: {available_kib} kB\n")
    _write(root, "proc/self/cgroup", cgroup)


def test_here_there_is_some() -> None:
    assert MIB < available_memory() < 1 << 62


def test_freed_memory_goes_back() -> None:
    """What loading a model freed would stay with the worker for its life: 280 MB for SmolLM2."""
    pieces = [np.ones(8 << 10) for _ in range(4000)]  # 64 KiB: too small to be a mapping of its own
    keep = pieces[-1]
    del pieces
    before = psutil.Process().memory_info().rss
    give_back_freed()
    assert before - psutil.Process().memory_info().rss > 100 * MIB
    assert keep[0] == 1.0


def test_machine_without_limits(tmp_path: Path) -> None:
    _machine(tmp_path, 2048, "0::/user.slice\n")
    _write(tmp_path, "sys/fs/cgroup/user.slice/memory.max", "max\n")
    assert available_memory(tmp_path) == 2 * MIB


def test_parent_group_limits_and_page_cache_is_room(tmp_path: Path) -> None:
    """Guards containers: the limit above counts, and mapped weights must not block a start."""
    _machine(tmp_path, 1 << 20, "0::/pod/box\n")
    _write(tmp_path, "sys/fs/cgroup/pod/box/memory.max", "max\n")
    _write(tmp_path, "sys/fs/cgroup/pod/memory.max", f"{100 * MIB}\n")
    _write(tmp_path, "sys/fs/cgroup/pod/memory.current", f"{90 * MIB}\n")
    stat = f"anon 1\nactive_file {20 * MIB}\ninactive_file {30 * MIB}\n"
    _write(tmp_path, "sys/fs/cgroup/pod/memory.stat", stat)
    assert available_memory(tmp_path) == 60 * MIB


def test_v1_group_of_a_container(tmp_path: Path) -> None:
    """Guards old hosts, where the container's own group is mounted as the root."""
    _machine(tmp_path, 1 << 20, "4:cpu,memory:/docker/abc\n3:cpuset:/\n")
    _write(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", f"{8 * MIB}\n")
    _write(tmp_path, "sys/fs/cgroup/memory/memory.usage_in_bytes", f"{7 * MIB}\n")
    _write(
        tmp_path,
        "sys/fs/cgroup/memory/memory.stat",
        f"inactive_file 0\ntotal_inactive_file {2 * MIB}\n",
    )
    assert available_memory(tmp_path) == 3 * MIB


def test_over_the_limit_is_zero(tmp_path: Path) -> None:
    _machine(tmp_path, 1 << 20, "0::/\n")
    _write(tmp_path, "sys/fs/cgroup/memory.max", f"{MIB}\n")
    _write(tmp_path, "sys/fs/cgroup/memory.current", f"{2 * MIB}\n")
    assert available_memory(tmp_path) == 0
