"""What the doctor says of GPUs, by NVML and by nvidia-smi; neither is here."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from shared.config import Deployment
from shared.device.gpus import Found, Gpu, ask_nvml, ask_smi, parse_topology, run_command
from tools.doctor import deployment as deployment_checks
from tools.doctor.deployment import check_memory
from tools.doctor.devices import check_devices, describe, wanted_devices

UUID = "GPU-8d1c0a2b-0000-1111-2222-33334444aAfF"
LISTING = f"""\
0, NVIDIA H200, 143771, 1203, 00000000:18:00.0, Disabled, 580.95.05, {UUID}
1, NVIDIA H200, 143771, 0, 00000000:9A:00.0, Enabled, 580.95.05, {UUID.replace("8", "9")}
"""
MATRIX = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-47\t0\tN/A
GPU1\tNV18\t X \tPHB\tSYS\t0-47\t0\tN/A
GPU2\tSYS\tPHB\t X \tSYS\t48-95\t1\tN/A
NIC0\tPIX\tSYS\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect
"""


def colocated(device: str) -> Deployment:
    tree = {
        "name": "t",
        "deployment_type": "colocated",
        "workers": {"mixed": {"device": device, "count": 2}},
    }
    return msgspec.convert(tree, Deployment)


def pci(folder: Path, **nodes: int) -> Path:
    for bus, node in nodes.items():
        place = folder / f"0000:{bus}:00.0"
        place.mkdir()
        (place / "numa_node").write_text(f"{node}\n")
    return folder


class Nvml:
    """The module, for two GPUs; ``broken`` raises from the function of that name."""

    class NVMLError(Exception):
        pass

    def __init__(self, broken: str = "") -> None:
        self.broken = broken
        self.open = 0

    def __getattr__(self, name: str) -> Any:
        answers: dict[str, Any] = {
            "nvmlDeviceGetCount": 2,
            "nvmlSystemGetDriverVersion": b"580.95.05",
            "nvmlDeviceGetName": "NVIDIA H200",
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=143771 << 20, used=1203 << 20),
            "nvmlDeviceGetPciInfo": SimpleNamespace(busId=b"00000000:18:00.0"),
            "nvmlDeviceGetMigMode": [0, 0],
            "nvmlDeviceGetUUID": UUID,
            "nvmlDeviceGetTopologyCommonAncestor": 50,
        }

        def call(*arguments: Any) -> Any:
            if name == self.broken:
                raise self.NVMLError("Not Supported")
            self.open += {"nvmlInit": 1, "nvmlShutdown": -1}.get(name, 0)
            return arguments[0] if name == "nvmlDeviceGetHandleByIndex" else answers.get(name)

        return call


def test_nvml_tells_memory_numa_and_topology(tmp_path: Path) -> None:
    nvml = Nvml()
    found = ask_nvml(nvml, pci(tmp_path, **{"18": 1}))
    gpu = Gpu(0, "NVIDIA H200", 143771, 1203, False, 1, "8d1c0a2b00001111222233334444aaff")
    links = ("cuda:0-cuda:1 across NUMA nodes",)
    assert found == Found("580.95.05", (gpu, msgspec.structs.replace(gpu, index=1)), links)
    assert nvml.open == 0


def test_nvml_without_a_driver_is_no_gpu() -> None:
    assert ask_nvml(Nvml("nvmlInit")) is None
    broken = Nvml("nvmlDeviceGetMemoryInfo")
    assert ask_nvml(broken) is None
    assert broken.open == 0


def test_gpus_that_know_no_mig_are_whole(tmp_path: Path) -> None:
    found = ask_nvml(Nvml("nvmlDeviceGetMigMode"), tmp_path)
    assert found is not None
    assert not found.gpus[0].sliced


def test_nvidia_smi_tells_the_same(tmp_path: Path) -> None:
    def run(command: list[str]) -> str:
        return MATRIX if "topo" in command else LISTING

    found = ask_smi(run, pci(tmp_path, **{"18": 0, "9a": 1}))
    assert found is not None
    assert found.driver == "580.95.05"
    assert [gpu.numa for gpu in found.gpus] == [0, 1]
    assert found.gpus[0].unit == "8d1c0a2b00001111222233334444aaff"
    lines = describe(found)
    assert lines[0].text.startswith("cuda:0 NVIDIA H200, 142568 of 143771 MiB free, NUMA node 0")
    assert "MIG slices (no CUDA IPC)" in lines[1].text
    assert "cuda:0-cuda:1 NV18" in lines[2].text
    assert (lines[3].level, lines[3].topic) == ("warn", "numa")


def test_the_topology_matrix_names_each_pair_once() -> None:
    """Columns of network cards, affinities and ids are none of the GPUs'."""
    assert parse_topology(MATRIX) == (
        "cuda:0-cuda:1 NV18",
        "cuda:0-cuda:2 SYS",
        "cuda:1-cuda:2 PHB",
    )
    assert parse_topology("") == ()


def test_without_gpus_there_is_one_quiet_line() -> None:
    def missing(command: list[str]) -> str:
        raise FileNotFoundError(command[0])

    assert ask_smi(missing) is None
    (line,) = describe(None)
    assert (line.level, line.topic) == ("ok", "devices")


def test_a_command_that_fails_or_is_missing_is_an_oserror() -> None:
    with pytest.raises(OSError, match="false"):
        run_command(["false"])
    with pytest.raises(OSError):
        run_command(["/nowhere/nvidia-smi"])


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is a CUDA build")
def test_a_device_the_deployment_names_is_tried() -> None:
    """`diptych up` would fail with the same sentence, once per restart of the worker."""
    assert wanted_devices(colocated("cuda:1")) == {"cuda:1": [("bf16", None)]}
    finding = check_devices(colocated("cuda:1"))[-1]
    assert (finding.level, finding.topic) == ("fail", "cuda:1")
    assert "needs a CUDA build of torch" in finding.text
    assert wanted_devices(colocated("cpu")) == {}


def test_gpu_workers_need_little_of_the_machines_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights counted twice would refuse an 8B model on a small host with a large GPU."""
    monkeypatch.setattr(deployment_checks, "available_memory", lambda: 2 << 30)
    assert "2 x mixed on cuda: 512 MiB" in check_memory(colocated("cuda"), 8_000_000_000)
