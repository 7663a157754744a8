"""``diptych bench transfer --device``: it compares bytes, and says no where there is no GPU."""

from pathlib import Path

import msgspec
import pytest
import torch
from rich.console import Console

from shared.device import open as devices
from shared.errors import BadConfig, ResourceMissing, TransferFailed
from shared.kv.layout import KvLayout, LayerKv
from tests.transport.fake_gpu_worker import open_fake
from tests.transport.test_worker_fake_gpus import FAKE
from tests.unit.device_pair import cuda_pool, raw
from tests.unit.fake_cupy import FakeRuntime
from tools.bench.transfer_device import compare, measure_devices, parse_devices
from tools.bench.transfer_plan import TransferPlan
from tools.bench.transfer_report import run_bench
from tools.bench.transfer_source import contents

LAYOUT = KvLayout(dtype="fp16", block_size=8, layers=(LayerKv(2, 16, 16), LayerKv(1, 8, 24)))


def plan(device: str, **changes: object) -> TransferPlan:
    made = TransferPlan(
        layout=LAYOUT,
        lengths=(20, 64),
        prefill_rate=1e5,
        chunk_bytes=1024,
        slots=4,
        repeats=1,
        device=device,
    )
    return msgspec.structs.replace(made, **changes)


def test_both_paths_are_measured_between_two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the stand-in for CUDA: figures mean nothing, but every byte was compared."""
    monkeypatch.setattr(devices, "open_device", open_fake)
    rows = measure_devices(plan("cuda:0,cuda:1"), lambda what: None, FAKE)
    assert [(row.path, row.tokens) for row in rows] == [
        *(("ipc", 20), ("host", 20), ("ipc", 64), ("host", 64)),
    ]
    assert all(row.bytes == -(-row.tokens // 8) * LAYOUT.block_bytes for row in rows)


def test_wrong_bytes_end_the_measurement() -> None:
    """Guards rates of copies that did not happen, whichever byte is missing."""
    pool = cuda_pool(FakeRuntime(), layout=LAYOUT)
    stream = pool.side_stream()
    for layer, part, content in contents(LAYOUT, pool.num_blocks):
        raw(pool, layer)[part][:] = content
    raw(pool, 1)[1][2, 5] ^= 1
    with pytest.raises(TransferFailed, match="layer 1 arrived with wrong bytes"):
        compare(pool, stream, pool.num_blocks)
    stream.close()
    pool.close()
    pool.arena.close()


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is a CUDA build")
def test_without_a_gpu_it_refuses_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ResourceMissing, match="needs a CUDA build of torch"):
        run_bench(plan("cuda"), tmp_path / "report", Console(quiet=True))
    assert not list(tmp_path.iterdir())
    for name in ("cpu,cuda", "cuda:0,cuda:1,cuda:2", "gpu"):
        with pytest.raises(BadConfig):
            run_bench(plan(name), None, Console(quiet=True))
    with pytest.raises(BadConfig, match="no --codec"):
        parse_devices(plan("cuda", codecs=("none", "int8")))
    assert parse_devices(plan("cuda:1")) == ("cuda:1", "cuda:1")
