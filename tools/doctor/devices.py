"""Which NVIDIA GPUs there are, how they are connected, and whether the deployment can use them."""

import importlib
import importlib.util
import itertools
import re
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

from msgspec import Struct

from shared.config import Deployment, WorkerSection
from shared.device.names import capability_problem, device_index
from shared.errors import BadConfig
from tools.doctor.finding import Finding, attempt, ok, warn

Nvml: TypeAlias = Any
"""The module ``pynvml`` of nvidia-ml-py; it is not typed."""

Run = Callable[[list[str]], str]
"""Runs a command; what it prints, or ``OSError``."""

Formats = tuple[str, str | None]
"""``precision`` and ``kv_dtype`` of a role."""

_TIMEOUT: Final = 20.0
_QUERY: Final = "index,name,memory.total,memory.used,pci.bus_id,mig.mode.current,driver_version"
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
    """One GPU; memory in MiB, ``numa`` its node where the machine says so."""

    index: int
    name: str
    total: int
    used: int
    sliced: bool
    numa: int | None

    def __str__(self) -> str:
        text = f"cuda:{self.index} {self.name}, {self.total - self.used} of {self.total} MiB free"
        if self.sliced:
            text += ", cut into MIG slices (no CUDA IPC)"
        return text if self.numa is None else f"{text}, NUMA node {self.numa}"


class Found(Struct, frozen=True):
    """``links`` are pairs of GPUs and what is between them."""

    driver: str
    gpus: tuple[Gpu, ...]
    links: tuple[str, ...]


def check_devices(deployment: Deployment | None) -> list[Finding]:
    """List the GPUs, and try those that the deployment names."""
    nvml = importlib.import_module("pynvml") if importlib.util.find_spec("pynvml") else None
    found = ask_nvml(nvml) if nvml is not None else None
    if found is None:
        found = ask_smi(run_command)
    findings = describe(found)
    if deployment is None:
        return findings
    tried = [
        attempt(name, partial(_try, name, formats))
        for name, formats in wanted_devices(deployment).items()
    ]
    if tried and all(finding.level == "ok" for finding in tried):
        # Here and not above: it imports torch, which takes seconds.
        from tools.doctor.device_pairs import check_pair, probe_processes

        tried += check_pair(deployment, probe_processes)
    return findings + tried


def wanted_devices(deployment: Deployment) -> dict[str, list[Formats]]:
    """Return the CUDA devices that workers are to run on, and in what formats."""
    workers = deployment.workers
    sections: list[WorkerSection | None] = [workers.prefill, workers.decode, workers.mixed]
    wanted: dict[str, list[Formats]] = {}
    for section in sections:
        if section is not None and section.count and section.device != "cpu":
            formats = (section.precision, section.kv_dtype)
            wanted.setdefault(section.device, []).append(formats)
    return wanted


def describe(found: Found | None) -> list[Finding]:
    """Put what was found into lines."""
    if found is None or not found.gpus:
        return [ok("devices", "no NVIDIA GPU; workers run on the CPU")]
    lines = [ok("devices", f"{gpu}; driver {found.driver}") for gpu in found.gpus]
    if found.links:
        lines.append(ok("topology", "; ".join(found.links)))
    nodes = {gpu.numa for gpu in found.gpus if gpu.numa is not None}
    if len(nodes) > 1:
        lines.append(
            warn("numa", "GPUs are on several NUMA nodes; give each worker `cores` of its GPU's")
        )
    return lines


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
        if len(fields) != 7 or not fields[0].isdigit():
            continue
        index, name, total, used, bus, mig, driver = fields
        mebibytes = [int(n) if n.isdigit() else 0 for n in (total, used)]
        sliced, numa = mig == "Enabled", numa_node(bus, pci)
        gpus.append(Gpu(int(index), name, mebibytes[0], mebibytes[1], sliced, numa))
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


def _try(name: str, formats: list[Formats]) -> str:
    """Check what a worker on this device checks first.

    Raises:
        ResourceMissing, BadConfig: a part is missing, or it is too old for a format.
    """
    import torch  # seconds, and only where a worker is to use a GPU

    from shared.device.open import TorchBuild, find_device

    index = device_index(name)
    assert index is not None
    build = TorchBuild(torch.__version__, torch.version.cuda)
    found = find_device(index, build, importlib.import_module)
    for precision, kv_dtype in formats:
        problem = capability_problem(found.capability, precision, kv_dtype)
        if problem is not None:
            raise BadConfig(problem)
    return f"{found.name}: torch {build.version}, CuPy and triton fit"


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
