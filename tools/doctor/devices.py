"""Which NVIDIA GPUs there are, and whether the deployment can use them."""

import importlib
from functools import partial

from shared.config import Deployment, WorkerSection
from shared.device.gpus import Found, find_gpus
from shared.device.names import capability_problem, device_index
from shared.errors import BadConfig
from tools.doctor.finding import Finding, attempt, ok, warn

Formats = tuple[str, str | None]
"""``precision`` and ``kv_dtype`` of a role."""


def check_devices(deployment: Deployment | None) -> list[Finding]:
    """List the GPUs, and try those that the deployment names."""
    findings = describe(find_gpus())
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
