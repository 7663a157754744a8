"""One line for the log: what a worker runs on, and how near its GPU is to its cores and others."""

from collections.abc import Callable, Sequence

from shared.cpuinfo import cpuinfo
from shared.device.gpus import Found, find_gpus
from shared.worker.cores import numa_nodes, write_cpus


def cores_line(cores: Sequence[int]) -> str:
    """Describe the processor's part that a worker has."""
    nodes = numa_nodes(cores)
    where = f" of NUMA node{'s' if len(nodes) > 1 else ''} {write_cpus(nodes)}" if nodes else ""
    return f"cores {write_cpus(cores)}{where}, {cpuinfo('model name') or 'unknown processor'}"


def gpu_line(device: str, unit: str, find: Callable[[], Found | None] = find_gpus) -> str:
    """Describe the GPU with UUID ``unit`` and what is between it and others.

    ``device`` is its name in the deployment file, and need not have the driver's number.
    """
    found = find()
    gpu = next((g for g in found.gpus if g.unit == unit), None) if found is not None else None
    if found is None or gpu is None:
        return f"{device}, whose place in the machine is unknown"
    name = f"cuda:{gpu.index}"
    text = f"{device} {gpu.what}"
    if device not in (name, name.removesuffix(":0")):
        text += f", the driver's {name}"
    links = [link for link in found.links if name in link.partition(" ")[0].split("-")]
    return "; ".join([text, *links])


def hardware_line(cores: Sequence[int], device: str, unit: str | None) -> str:
    """Describe all of it; ``unit`` is None for a worker without a GPU."""
    parts = [cores_line(cores)] if unit is None else [cores_line(cores), gpu_line(device, unit)]
    return "; ".join(parts)
