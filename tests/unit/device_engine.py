"""An engine through the device runner on the CPU: plain kernels, graphs that do the work again."""

from collections.abc import Callable
from pathlib import Path

from shared.device.cpu import CpuDevice
from shared.device.device import Graph
from shared.engine.device.kernels import DeviceKernels
from shared.engine.device.load import prepare_on
from shared.engine.device.runner import DeviceRunner
from shared.engine.engine import Engine
from shared.engine.prepared import LoadRequest
from shared.precision import kv_dtype_for
from tests.unit.engine_models import BLOCK, Driver


class Again:
    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        self._work()


class RecordingDevice(CpuDevice):
    """Keeps what it recorded in ``graphs``."""

    def __init__(self) -> None:
        self.graphs: list[Again] = []

    def record(self, work: Callable[[], None]) -> Graph | None:
        self.graphs.append(Again(work))
        return self.graphs[-1]


def device_driver(
    directory: Path, device: RecordingDevice, kernels: DeviceKernels, most: int
) -> tuple[Driver, DeviceRunner]:
    """Load a tiny model; graphs for up to ``most`` sequences, none for 0."""
    request = LoadRequest(directory, "fp32", kv_dtype_for("fp32", None), BLOCK, None)
    prepared, runner = prepare_on(device, request, kernels, "test kernels")
    driver = Driver(Engine(prepared, directory, 1), num_blocks=96)
    driver.reserve(driver.arena.num_blocks - 1)
    if most:
        runner.record(most, prepared.facts.max_model_len)
    return driver, runner
