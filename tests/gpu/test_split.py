"""Prefill and decode in processes of their own on GPUs: the text of one process that does both."""

from functools import partial
from pathlib import Path

import pytest
import torch
from msgspec import Struct

from shared.device.cuda import CudaDevice
from shared.device.names import FP8_CAPABILITY
from shared.ids import WorkerId
from shared.messages.router_worker import Run
from tests.conftest import RunAsync
from tests.transport import worker_rig
from tests.transport.worker_rig import Rig, make_config, make_model, request, rig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.keeps("threads", "fds", "memory"),
    pytest.mark.timeout(900),
]

PROMPTS = tuple(
    tuple(1 + (i * k + k) % 90 for i in range(n)) for k, n in enumerate((5, 33, 130), 3)
)
OUTPUT = 24


class Case(Struct, frozen=True):
    """Devices, configured path, the paths that may be taken, and the dtype of KV."""

    prefill: str
    decode: str
    path: str
    used: tuple[str, ...]
    kv: str = "fp32"


def formats(case: Case) -> dict[str, object]:
    return {"precision": "fp32", "kv_dtype": case.kv}


def changes(case: Case) -> dict[str, object]:
    """Return what a split deployment on these devices changes in the rig's file."""
    worker = {"count": 1, "kv_memory": "64MiB", "max_batch_tokens": 64} | formats(case)
    return {
        "workers": {
            "prefill": worker | {"device": case.prefill},
            "decode": worker | {"device": case.decode},
        },
        "transfer": {"path": case.path, "notify_layers": 1},
    }


async def colocated(config: Path) -> list[list[int]]:
    async with rig(config, "mixed-0") as router:
        found = []
        for prompt in PROMPTS:
            dispatch = router.next_dispatch()
            router.send("mixed-0", Run(dispatch=dispatch, request=request(prompt, OUTPUT)))
            found.append(await router.output(dispatch))
        return found


async def split(config: Path) -> tuple[list[list[int]], Rig]:
    async with rig(config, "prefill-0", "decode-0") as router:
        works = [router.split(request(prompt, OUTPUT))[1] for prompt in PROMPTS]
        found = [await router.output(work) for work in works]
        peer = router.hellos[WorkerId("decode-0")][0]
        await router.until(lambda: peer in router.reports and bool(router.reports[peer].pairs))
        return found, router


@pytest.mark.parametrize(
    "case",
    [
        Case("cuda:0", "cuda:0", "auto", ("ipc",)),
        Case("cuda:0", "cuda:1", "auto", ("ipc", "host")),
        Case("cuda:0", "cuda:0", "host", ("host",)),
        Case("cuda:0", "cpu", "auto", ("host",)),
        Case("cpu", "cuda:0", "auto", ("host",)),
        Case("cuda:0", "cuda:0", "auto", ("ipc",), kv="fp8"),
        Case("cuda:0", "cuda:0", "host", ("host",), kv="fp8"),
    ],
    ids=lambda case: f"{case.prefill}-{case.decode}-{case.path}-{case.kv}",
)
def test_split_equals_colocated(
    device: CudaDevice,
    run_async: RunAsync,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: Case,
) -> None:
    """In fp32, by every path, also where one role is on the CPU; and with KV in fp8."""
    if case.kv == "fp8" and device.facts().capability < FP8_CAPABILITY:
        pytest.skip("fp8 needs compute capability 8.9")
    if "cuda:1" in (case.prefill, case.decode) and torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU only")
    monkeypatch.setattr(worker_rig, "DEADLINE", 300.0)  # kernels are compiled at the start
    model = make_model(tmp_path / "model")
    run = partial(run_async, timeout=600.0)
    mixed = {"workers": {"mixed": {"device": "cuda:0", "kv_memory": "64MiB"} | formats(case)}}
    alone, apart = tmp_path / "alone", tmp_path / "apart"
    for directory in (alone, apart):
        directory.mkdir()
    expected = run(colocated(make_config(alone, model, split=False, **mixed)))
    config = make_config(apart, model, split=True, **changes(case))
    found, router = run(split(config))
    assert found == expected
    (pair,) = router.reports[router.hellos[WorkerId("decode-0")][0]].pairs
    assert pair.path in case.used and pair.failed == 0
