"""The measurement of KV between two processes on GPUs runs; its figures are for reading."""

import pytest
import torch

from shared.device.cuda import CudaDevice
from shared.kv.layout import KvLayout, LayerKv
from tools.bench.transfer_device import measure_devices
from tools.bench.transfer_plan import TransferPlan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.keeps("threads", "fds", "memory"),
    pytest.mark.timeout(600),
]

LEAST = 4 << 20
LAYOUT = KvLayout(dtype="bf16", block_size=16, layers=(LayerKv(8, 128, 128),) * 8)


@pytest.mark.parametrize("sender", ["cuda:0", "cuda:1"])
def test_cuda_ipc_beside_a_copy_within_the_gpu(device: CudaDevice, sender: str) -> None:
    """Every byte is compared; a rate above the reference's would be an error in the arithmetic."""
    if int(sender[-1]) >= torch.cuda.device_count():
        pytest.skip("there is one GPU only")
    plan = TransferPlan(
        layout=LAYOUT, lengths=(128, 1024, 8192), prefill_rate=1e5, device=f"{sender},cuda:0"
    )
    rows = measure_devices(plan, print)
    large = [row for row in rows if row.path == "ipc" and row.bytes >= LEAST]
    assert len(large) == 3 and all(0 < row.share < 1.5 for row in large)
    for row in large:
        print(
            f"{row.bytes >> 20} MiB: {row.rate / 1e9:.1f} GB/s, {100 * row.share:.0f} % of a copy"
        )
