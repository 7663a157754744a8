"""What a worker says of its hardware: its own GPU, not the one that has its number elsewhere."""

import pytest

from shared.device.gpus import Found, Gpu
from shared.worker.hardware import cores_line, gpu_line, hardware_line

ONE = Gpu(0, "NVIDIA H200", 143771, 1203, False, 1, "aa")
OTHER = Gpu(1, "NVIDIA L4", 23034, 0, False, None, "bb")
LINKS = ("cuda:0-cuda:1 NV18", "cuda:0-cuda:2 SYS", "cuda:1-cuda:2 PHB", "cuda:0-cuda:10 SYS")
FOUND = Found("580.95.05", (ONE, OTHER), LINKS)


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_a_gpu_is_named_with_its_place_and_its_links_only(device: str) -> None:
    """Guards a line that says how other GPUs are connected."""
    assert gpu_line(device, "aa", lambda: FOUND) == (
        f"{device} NVIDIA H200, 142568 of 143771 MiB free, NUMA node 1; "
        "cuda:0-cuda:1 NV18; cuda:0-cuda:2 SYS; cuda:0-cuda:10 SYS"
    )


def test_a_gpu_is_found_by_its_uuid_whatever_its_number() -> None:
    """Guards ``CUDA_VISIBLE_DEVICES``, by which CUDA numbers GPUs otherwise than the driver."""
    assert gpu_line("cuda:0", "bb", lambda: FOUND) == (
        "cuda:0 NVIDIA L4, 23034 of 23034 MiB free, the driver's cuda:1; "
        "cuda:0-cuda:1 NV18; cuda:1-cuda:2 PHB"
    )


def test_what_is_not_known_is_not_guessed() -> None:
    for found in (None, FOUND):
        line = gpu_line("cuda:0", "cc", lambda found=found: found)  # type: ignore[misc]
        assert line == "cuda:0, whose place in the machine is unknown"


def test_a_worker_without_a_gpu_asks_for_none() -> None:
    assert hardware_line((0,), "cpu", None) == cores_line((0,))
    assert cores_line((0,)).startswith("cores 0")
