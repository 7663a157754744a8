"""What the doctor says of CUDA IPC between the GPUs of two roles. CUDA is a stand-in."""

import subprocess

import msgspec
import pytest
import torch

from shared.config import Deployment
from shared.device.cuda import CudaDevice
from shared.device.cuda_memory import CupyMemory
from shared.messages.prefill_decode import ArenaDescriptor
from tests.unit.fake_cupy import FakeCupy, FakeRuntime, view
from tools.doctor.device_pairs import check_pair, probe_processes, wanted_pair
from tools.doctor.ipc_probe import Probed, own, read


def deployment(prefill: str, decode: str, path: str = "auto") -> Deployment:
    workers = {"prefill": {"device": prefill}, "decode": {"device": decode}}
    tree = {"name": "t", "deployment_type": "split", "workers": workers, "transfer": {"path": path}}
    return msgspec.convert(tree, Deployment)


def device(runtime: FakeRuntime, index: int, *, sliced: bool = False) -> CudaDevice:
    memory = CupyMemory(FakeCupy(runtime), index, view, sliced=sliced)
    return CudaDevice(index, memory, "fake", memory.unit())


def probe(
    theirs: FakeRuntime, ours: FakeRuntime, *, index: int = 0, sliced: bool = False
) -> Probed:
    """Return what the reader says while the owner waits."""
    told: list[ArenaDescriptor] = []
    found: list[Probed] = []
    owner = device(theirs, index, sliced=sliced)
    own(owner, told.append, lambda: found.append(read(device(ours, 0), told[0])))
    for runtime in (theirs, ours):
        assert not runtime.taken and not runtime.mapped and not runtime.streams
    return found[0]


def test_what_works_and_what_does_not_has_a_pairs_own_reasons() -> None:
    assert probe(FakeRuntime(), FakeRuntime()) == Probed(None)
    assert probe(FakeRuntime(), FakeRuntime(), index=1) == Probed(None)
    assert probe(FakeRuntime(), FakeRuntime(), sliced=True).reason == "mig"
    apart, refusing = FakeRuntime(), FakeRuntime()
    apart.no_peers = True
    found = probe(FakeRuntime(), apart, index=1)
    assert found.reason == "no_peer_access" and "cuda:1" in found.message
    refusing.fails["ipcOpenMemHandle"] = 801
    found = probe(FakeRuntime(), refusing)
    assert found.reason == "cannot_map" and "`ipc: host`" in found.message


def test_the_finding_weighs_as_much_as_the_path_needs_it() -> None:
    """`transfer.path: ipc` cannot run without, `auto` only gets slower."""

    def none(owner: str, reader: str) -> Probed:
        assert (owner, reader) == ("cuda:0", "cuda:1")
        return Probed("no_peer_access", "no way")

    (line,) = check_pair(deployment("cuda:0", "cuda:1"), none)
    assert (line.level, line.topic) == ("warn", "cuda ipc")
    assert line.text == "cuda:0 to cuda:1: no_peer_access: no way; KV will go by host"
    (line,) = check_pair(deployment("cuda:0", "cuda:1", "ipc"), none)
    assert line.level == "fail"
    (line,) = check_pair(deployment("cuda:0", "cuda:1"), lambda *pair: Probed(None))
    assert line.level == "ok"


def test_nothing_is_tried_where_no_pair_would() -> None:
    assert wanted_pair(deployment("cuda:0", "cuda:0")) == ("cuda:0", "cuda:0")
    for prefill, decode, path in (("cpu", "cuda", "auto"), ("cuda", "cuda", "host")):
        assert wanted_pair(deployment(prefill, decode, path)) is None
    alone = {"name": "t", "deployment_type": "colocated", "workers": {"mixed": {"device": "cuda"}}}
    assert wanted_pair(msgspec.convert(alone, Deployment)) is None


def test_a_probe_that_hangs_or_babbles_is_a_warning() -> None:
    def hangs(owner: str, reader: str) -> Probed:
        raise subprocess.TimeoutExpired("probe", 1)

    (line,) = check_pair(deployment("cuda", "cuda"), hangs)
    assert line.level == "warn" and "could not be tried" in line.text


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is a CUDA build")
def test_the_processes_say_what_is_missing() -> None:
    """Guards a traceback where a sentence should be: the real processes, without a GPU."""
    found = probe_processes("cuda:0", "cuda:0")
    assert found.reason == "cannot_map" and "needs a CUDA build of torch" in found.message
