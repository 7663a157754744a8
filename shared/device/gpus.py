"""Which NVIDIA GPUs this machine has and what is between them, by NVML or by nvidia-smi."""

import importlib
import importlib.util
import itertools
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeAlias

from msgspec import Struct

Nvml: TypeAlias = Any
"""The module ``pynvml`` of nvidia-ml-py; it is not typed."""

Run = Callable[[list[str]], str]
"""Runs a command; what it prints, or ``OSError``."""

_TIMEOUT: Final = 20.0
_QUERY: Final = (
    "index,name,memory.total,memory.used,pci.bus_id,mig.mode.current,driver_version,uuid"
)
_GPU: Final = re.compile(r"GPU[0-9]+$")
_PCI: Final = Path("/sys/bus/pci/devices")
_LEVELS: Final = {
    0: "same board",
    10: "one PCIe switch",
    20: "several PCIe switches",
    30: "PCIe host bridge",
    40: "same NUMA node",
    50: "across NUMA nodes",
}
"""NVML's topology levels."""


class Gpu(Struct, frozen=True):
    """One GPU; memory in MiB, ``numa`` its node where the machine says so.

    ``index`` is the driver's number, which is CUDA's unless ``CUDA_VISIBLE_DEVICES`` changes that.
    ``unit`` is its UUID as 32 digits, empty if unknown.
    """

    index: int
    name: str
    total: int
    used: int
    sliced: bool
    numa: int | None
    unit: str = ""

    def __str__(self) -> str:
        return f"cuda:{self.index} {self.what}"

    @property
    def what(self) -> str:
        """Its name, memory and place."""
        text = f"{self.name}, {self.total - self.used} of {self.total} MiB free"
        if self.sliced:
            text += ", cut into MIG slices (no CUDA IPC)"
        return text if self.numa is None else f"{text}, NUMA node {self.numa}"


class Found(Struct, frozen=True):
    """``links`` are pairs of GPUs and what is between them."""

    driver: str
    gpus: tuple[Gpu, ...]
    links: tuple[str, ...]


def find_gpus() -> Found | None:
    """Ask NVML, else ``nvidia-smi``; None where there is no driver."""
    nvml = importlib.import_module("pynvml") if importlib.util.find_spec("pynvml") else None
    found = ask_nvml(nvml) if nvml is not None else None
    return found if found is not None else ask_smi(run_command)


def ask_nvml(nvml: Nvml, pci: Path = _PCI) -> Found | None:
    """Ask NVML; None where there is no driver to ask."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        gpus = tuple(_gpu_of(nvml, i, handle, pci) for i, handle in enumerate(handles))
        links = []
        for (i, one), (j, other) in itertools.combinations(enumerate(handles), 2):
            level = int(nvml.nvmlDeviceGetTopologyCommonAncestor(one, other))
            links.append(f"cuda:{i}-cuda:{j} {_LEVELS.get(level, f'level {level}')}")
        return Found(_text(nvml.nvmlSystemGetDriverVersion()), gpus, tuple(links))
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()


def _gpu_of(nvml: Nvml, index: int, handle: Any, pci: Path) -> Gpu:  # noqa: ANN401
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    try:
        sliced = bool(nvml.nvmlDeviceGetMigMode(handle)[0])
    except nvml.NVMLError:
        sliced = False  # GPUs without MIG answer that they know no such thing
    return Gpu(
        index,
        _text(nvml.nvmlDeviceGetName(handle)),
        int(memory.total) >> 20,
        int(memory.used) >> 20,
        sliced,
        numa_node(_text(nvml.nvmlDeviceGetPciInfo(handle).busId), pci),
        _unit(_text(nvml.nvmlDeviceGetUUID(handle))),
    )


def ask_smi(run: Run, pci: Path = _PCI) -> Found | None:
    """Ask ``nvidia-smi``; None where there is none, or no driver."""
    try:
        listing = run(["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"])
    except OSError:
        return None
    gpus, driver = [], "unknown"
    for line in listing.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 8 or not fields[0].isdigit():
            continue
        index, name, total, used, bus, mig, driver, uuid = fields
        mebibytes = [int(n) if n.isdigit() else 0 for n in (total, used)]
        sliced, numa = mig == "Enabled", numa_node(bus, pci)
        gpus.append(Gpu(int(index), name, mebibytes[0], mebibytes[1], sliced, numa, _unit(uuid)))
    try:
        links = parse_topology(run(["nvidia-smi", "topo", "-m"])) if len(gpus) > 1 else ()
    except OSError:
        links = ()
    return Found(driver, tuple(gpus), links)


def parse_topology(matrix: str) -> tuple[str, ...]:
    """Read the matrix of ``nvidia-smi topo -m``: each pair of GPUs once, in its own words."""
    table = [re.sub(r"\x1b\[[0-9]*m", "", line).split() for line in matrix.splitlines()]
    rows = {cells[0]: cells[1:] for cells in table if "X" in cells and _GPU.match(cells[0])}
    links = []
    for (i, (name, cells)), (j, other) in itertools.product(
        enumerate(rows.items()), enumerate(rows)
    ):
        if i < j < len(cells):  # the matrix's columns begin with the GPUs, in the order of rows
            links.append(f"cuda:{name[3:]}-cuda:{other[3:]} {cells[j]}")
    return tuple(links)


def numa_node(bus: str, pci: Path = _PCI) -> int | None:
    """Return the NUMA node of a PCI device such as 00000000:3B:00.0, None where unknown."""
    domain, _, rest = bus.lower().partition(":")
    try:
        node = int((pci / f"{domain[-4:]}:{rest}" / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def run_command(command: list[str]) -> str:
    """Run a command for what it prints; ``OSError`` if it is missing, fails or hangs."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_TIMEOUT
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{command[0]} does not answer") from error
    if done.returncode:
        raise OSError(f"{command[0]}: {done.stdout.strip() or done.stderr.strip()}")
    return done.stdout


def _unit(uuid: str) -> str:
    """Return ``GPU-8d1c…`` the way CUDA's UUIDs are written here."""
    return uuid.removeprefix("GPU-").replace("-", "").lower()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
