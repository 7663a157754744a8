"""What `device: cuda` answers where something is missing: one sentence, and what to do."""

from typing import Any

import pytest
import torch

from shared.device.cpu import CpuDevice
from shared.device.names import device_index
from shared.device.open import Finding, TorchBuild, find_device, open_device
from shared.errors import BadConfig, ResourceMissing
from tests.unit.fake_cupy import FakeCupy, FakeRuntime

BUILD = TorchBuild("2.13.0+cu128", "12.8")


class Modules:
    """Imports the fake, and whatever else is said to be installed."""

    def __init__(self, runtime: FakeRuntime, *missing: str) -> None:
        self._runtime = runtime
        self._missing = missing

    def __call__(self, name: str) -> Any:
        if name in self._missing:
            raise ImportError(f"No module named {name!r}")
        return FakeCupy(self._runtime)


def refused(build: TorchBuild, load: Modules, index: int = 0) -> str:
    with pytest.raises(ResourceMissing) as caught:
        find_device(index, build, load)
    return caught.value.message


def test_a_device_with_all_it_needs_is_found() -> None:
    assert find_device(1, BUILD, Modules(FakeRuntime())) == Finding(
        1, "NVIDIA H200", "01" * 16, False, (9, 0)
    )


def test_a_cpu_build_of_torch_is_named() -> None:
    text = refused(TorchBuild("2.13.0+cpu", None), Modules(FakeRuntime(), "cupy", "triton"))
    assert "torch 2.13.0+cpu is for CPUs only" in text
    assert "`device: cpu`" in text


@pytest.mark.parametrize(("cuda", "extra"), [("12.8", "cuda12"), ("13.0", "cuda13")])
def test_missing_cupy_names_the_extra_of_this_cuda(cuda: str, extra: str) -> None:
    text = refused(TorchBuild("2.13.0", cuda), Modules(FakeRuntime(), "cupy"))
    assert f"pip install 'diptych-server[{extra}]'" in text


def test_cupy_of_another_cuda_is_not_loaded_beside_torchs() -> None:
    """Two CUDA runtimes in one process crash at the first shared tensor."""
    text = refused(BUILD, Modules(FakeRuntime(version=13000)))
    assert "CuPy is for CUDA 13 and torch for CUDA 12" in text


def test_torch_for_a_cuda_we_have_no_cupy_for() -> None:
    assert "for CUDA 11.8" in refused(TorchBuild("2.1", "11.8"), Modules(FakeRuntime()))


@pytest.mark.parametrize(
    ("status", "sentence"),
    [(100, "there is no CUDA device"), (35, "update the driver"), (3, "CUDA does not start")],
)
def test_no_device_and_no_driver_are_told_apart(status: int, sentence: str) -> None:
    runtime = FakeRuntime()
    runtime.fails["getDeviceCount"] = status
    assert sentence in refused(BUILD, Modules(runtime))


def test_a_number_past_the_devices_says_how_many_there_are() -> None:
    assert "there are 2 CUDA devices" in refused(BUILD, Modules(FakeRuntime()), 2)


def test_missing_triton_is_named() -> None:
    assert "needs triton" in refused(BUILD, Modules(FakeRuntime(), "triton"))


def test_devices_too_old_for_the_kernels_are_refused() -> None:
    runtime = FakeRuntime(name=b"Tesla T4")
    runtime.capability = (7, 5)
    assert "compute capability 7.5" in refused(BUILD, Modules(runtime))


def test_a_mig_slice_is_known_as_one() -> None:
    runtime = FakeRuntime(name=b"NVIDIA A100-SXM4-40GB MIG 1g.5gb")
    assert find_device(0, BUILD, Modules(runtime)).sliced


def test_names_of_devices() -> None:
    assert [device_index(n) for n in ("cpu", "cuda", "cuda:0", "cuda:12")] == [None, 0, 0, 12]
    for name in ("gpu", "cuda:", "cuda:-1", "cuda:1x", "CUDA", "cuda:100"):
        with pytest.raises(BadConfig, match="cpu, cuda or cuda:N"):
            device_index(name)
    assert isinstance(open_device("cpu"), CpuDevice)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is a CUDA build")
def test_a_worker_on_cuda_does_not_start_on_the_cpu_instead() -> None:
    """Served ten times too slowly, and nobody told."""
    with pytest.raises(ResourceMissing, match=r"`device: cuda:1` needs a CUDA build of torch"):
        open_device("cuda:1")
