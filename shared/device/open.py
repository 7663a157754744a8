"""From a device's name in the deployment file to the device, or one sentence why not."""

from typing import Any, Final, Protocol

from msgspec import Struct

from shared.device.cpu import CpuDevice
from shared.device.cuda_memory import CupyMemory, unit_of
from shared.device.device import Device
from shared.device.names import device_index
from shared.errors import ResourceMissing

_EXTRAS: Final = {12: "cuda12", 13: "cuda13"}
"""Extras of this package by CUDA's major version."""

_NO_DEVICE: Final = 100
_OLD_DRIVER: Final = 35
_LEAST_CAPABILITY: Final = (8, 0)


class TorchBuild(Struct, frozen=True):
    """``cuda``: the CUDA version that torch was built for, such as 12.8; None for a CPU build."""

    version: str
    cuda: str | None


class Finding(Struct, frozen=True):
    """A device that can be used. ``sliced``: it is a MIG slice; ``capability``: 9.0 as (9, 0)."""

    index: int
    name: str
    unit: str
    sliced: bool
    capability: tuple[int, int]


class Importer(Protocol):
    """Imports by name, as ``importlib.import_module`` does."""

    def __call__(self, name: str) -> Any:  # noqa: ANN401
        """Return the module or raise ``ImportError``."""
        ...


def open_device(name: str) -> Device:
    """Open ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        BadConfig: no device is called so.
        ResourceMissing: the device or a library for it is missing; says what to install.
    """
    index = device_index(name)
    if index is None:
        return CpuDevice()
    # Here and not above: a CPU worker starts without them.
    from importlib import import_module

    import torch

    from shared.device.cuda import CudaDevice
    from shared.device.cuda_view import view

    found = _find(index)
    torch.cuda.set_device(index)
    memory = CupyMemory(import_module("cupy"), index, view(index), sliced=found.sliced)
    return CudaDevice(index, memory, found.name, found.unit, found.capability)


def require_device(name: str) -> None:
    """Raise as ``open_device`` where it would, and open nothing."""
    index = device_index(name)
    if index is not None:
        _find(index)


def _find(index: int) -> Finding:
    from importlib import import_module

    import torch

    return find_device(index, TorchBuild(torch.__version__, torch.version.cuda), import_module)


def find_device(index: int, build: TorchBuild, load: Importer) -> Finding:
    """Check everything that ``cuda:index`` needs, in the order in which it would be repaired.

    Raises:
        ResourceMissing: one sentence with what is missing and what to do.
    """
    where = f"`device: cuda:{index}`"
    if build.cuda is None:
        raise ResourceMissing(
            f"{where} needs a CUDA build of torch, and torch {build.version} is for CPUs only; "
            "install one from https://pytorch.org, or set `device: cpu`"
        )
    major = int(build.cuda.partition(".")[0])
    extra = _EXTRAS.get(major)
    if extra is None:
        raise ResourceMissing(
            f"{where} needs torch for CUDA 12 or 13; torch {build.version} is for CUDA {build.cuda}"
        )
    try:
        cupy = load("cupy")
    except ImportError as error:
        raise ResourceMissing(
            f"{where} needs CuPy for CUDA {major}: pip install 'diptych-server[{extra}]' ({error})"
        ) from error
    runtime = cupy.cuda.runtime
    theirs = int(runtime.runtimeGetVersion()) // 1000
    if theirs != major:
        raise ResourceMissing(
            f"{where}: CuPy is for CUDA {theirs} and torch for CUDA {major}; uninstall CuPy, then "
            f"pip install 'diptych-server[{extra}]'"
        )
    count = _count(runtime, where)
    if index >= count:
        raise ResourceMissing(f"{where}: there are {count} CUDA devices, numbered from 0")
    _require_attention(load, where, extra)
    return _examine(runtime, index, where)


def _count(runtime: Any, where: str) -> int:  # noqa: ANN401
    try:
        return int(runtime.getDeviceCount())
    except RuntimeError as error:
        status = getattr(error, "status", None)
        if status == _NO_DEVICE:
            text = (
                "there is no CUDA device; in a container it must be handed in (compose.gpu.yaml, "
                "or --gpus)"
            )
        elif status == _OLD_DRIVER:
            text = "there is no NVIDIA driver, or it is older than CUDA; update the driver"
        else:
            text = f"CUDA does not start: {error}"
        raise ResourceMissing(f"{where}: {text}; or set `device: cpu`") from error


def _require_attention(load: Importer, where: str, extra: str) -> None:
    try:
        load("triton")
    except ImportError as error:
        raise ResourceMissing(
            f"{where} needs triton: pip install 'diptych-server[{extra}]' ({error})"
        ) from error


def _examine(runtime: Any, index: int, where: str) -> Finding:  # noqa: ANN401
    facts = runtime.getDeviceProperties(index)
    raw = facts["name"]
    name = raw.decode() if isinstance(raw, bytes) else str(raw)
    capability = (int(facts["major"]), int(facts["minor"]))
    if capability < _LEAST_CAPABILITY:
        raise ResourceMissing(
            f"{where}: {name} has compute capability {capability[0]}.{capability[1]}; "
            "8.0 (Ampere) or newer is needed"
        )
    return Finding(index, name, unit_of(facts), " MIG " in name, capability)
