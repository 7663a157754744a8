"""The measurement of an 8B-shaped model runs; its figures are for reading, not for passing."""

import json
from pathlib import Path
from typing import Literal

import pytest
from rich.console import Console

from shared.device.cuda import CudaDevice
from shared.device.names import FP8_CAPABILITY
from tools.bench.engine.on_device import bench_on_device
from tools.bench.engine.roofline import Work

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.keeps("threads", "fds", "memory"),
    pytest.mark.timeout(900),
]

NEEDED = 24 << 30


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_an_8b_shape_beside_the_devices_own_rates(
    device: CudaDevice, tmp_path: Path, precision: Literal["bf16", "fp8"]
) -> None:
    """More than all a device can do would be an error in the arithmetic."""
    if device.facts().memory_free < NEEDED:
        pytest.skip(f"{NEEDED >> 30} GiB of free GPU memory are needed")
    work = Work(
        batches=(1, 32),
        context=1024,
        prompts=(2048,),
        steps=24,
        precision=precision,
        kv_dtype=precision,
    )
    if precision == "fp8" and device.facts().capability < FP8_CAPABILITY:
        pytest.skip("fp8 needs compute capability 8.9")
    console = Console(width=120)
    assert bench_on_device("cuda", "random-8b", work, tmp_path / "r", False, console) == 0
    report = json.loads((tmp_path / "r.json").read_text())
    assert [line["bound"] for line in report["lines"]] == ["copy", "copy", "multiply"]
    assert all(0 < line["fraction"] < 1.2 for line in report["lines"])
