"""Which logical CPUs a worker gets, and how many threads they are good for.

Two hardware threads of one core share its arithmetic, which one thread of ours fills: workers are
given whole cores where there are enough, and one thread for each of them.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, TypeVar

from msgspec import Struct

T = TypeVar("T")
Siblings = dict[int, tuple[int, ...]]
"""Logical CPU -> the logical CPUs of the same core, itself included."""

_TOPOLOGY: Final = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
_NODES: Final = Path("/sys/devices/system/node")
_BLOCK: Final = 32
"""Outputs of a linear layer that are handed out as one piece (kernels/api.h, ``kBlockCols``)."""


class Share(Struct, frozen=True):
    """``cores`` are logical CPUs to run on, and the first ``threads`` of them one thread's each."""

    cores: tuple[int, ...]
    threads: int


def read_siblings(cpus: Iterable[int]) -> Siblings:
    """Return what Linux tells of each logical CPU; one it says nothing of is a core of its own."""
    found: Siblings = {}
    for cpu in cpus:
        try:
            text = Path(_TOPOLOGY.format(cpu)).read_text(encoding="ascii")
            found[cpu] = parse_cpus(text)
        except (OSError, ValueError):
            found[cpu] = (cpu,)
    return found


def parse_cpus(text: str) -> tuple[int, ...]:
    """Read a list such as ``0-1,8``. Raises ``ValueError``."""
    found: list[int] = []
    for part in text.strip().split(","):
        low, _, high = part.partition("-")
        found += range(int(low), int(high or low) + 1)
    return tuple(found)


def write_cpus(cpus: Iterable[int]) -> str:
    """Return a list such as ``0-1,8``, as Linux writes it."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def numa_nodes(cpus: Iterable[int], folder: Path = _NODES) -> tuple[int, ...]:
    """Return the NUMA nodes of these logical CPUs, none where Linux does not tell."""
    mine = set(cpus)
    nodes = []
    for path in folder.glob("node[0-9]*/cpulist"):
        try:
            if mine.intersection(parse_cpus(path.read_text(encoding="ascii"))):
                nodes.append(int(path.parent.name.removeprefix("node")))
        except (OSError, ValueError):
            continue  # a node without CPUs has an empty list
    return tuple(sorted(nodes))


def physical_cores(available: Iterable[int], siblings: Siblings) -> list[tuple[int, ...]]:
    """Return the available logical CPUs core by core, in the order of each core's first."""
    mine = sorted(set(available))
    groups: dict[int, tuple[int, ...]] = {}
    for cpu in mine:
        group = tuple(c for c in mine if c == cpu or c in siblings.get(cpu, ()))
        groups.setdefault(group[0], group)
    return list(groups.values())


def one_of_each_first(groups: Sequence[tuple[int, ...]]) -> list[int]:
    """Return all logical CPUs: the first of every core, then the second of every core."""
    most = max(map(len, groups), default=0)
    return [group[i] for i in range(most) for group in groups if i < len(group)]


def share_of_machine(groups: Sequence[tuple[int, ...]], index: int, count: int) -> Share:
    """Return the ``index``-th of ``count`` even shares of a machine's cores.

    Whole cores where each worker gets one, else logical CPUs; those overlap when they are too few.
    """
    if count <= len(groups):
        mine = share_of_cores(groups, index, count)
        return Share(tuple(one_of_each_first(mine)), len(mine))
    cpus = share_of_cores(one_of_each_first(groups), index, count)
    return Share(tuple(sorted(cpus)), len(cpus))


def share_of_cores(available: Sequence[T], index: int, count: int) -> tuple[T, ...]:
    """Return the ``index``-th of ``count`` even shares; shares overlap when cores are few."""
    if count > len(available):
        return (available[index % len(available)],)
    bounds = [i * len(available) // count for i in (index, index + 1)]
    return tuple(available[bounds[0] : bounds[1]])


def useful_threads(hidden: int) -> int:
    """Return how many threads have work in every layer of a decode step.

    Two of a layer's four products have ``hidden`` outputs, in blocks of 32: further threads would
    only be waited for.
    """
    return max(1, -(-hidden // _BLOCK))
