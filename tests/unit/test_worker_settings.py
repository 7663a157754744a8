"""What a worker cuts out of the deployment file, and its share of the machine."""

import os

import msgspec
import pytest

from shared.config import Deployment, TransferSection, WorkerSection, WorkersSection
from shared.errors import BadConfig
from shared.worker.cores import share_of_cores
from shared.worker.settings import threads_for, worker_settings

SPLIT = Deployment(
    name="d",
    deployment_type="split",
    workers=WorkersSection(
        prefill=WorkerSection(count=2, max_batch_tokens=32, max_sequences=64),
        decode=WorkerSection(count=1),
    ),
    runtime_dir="/run/d",
)


@pytest.mark.parametrize(
    ("cores", "workers", "shares"),
    [
        ([0, 1], 2, [(0,), (1,)]),
        ([0, 1, 2, 3, 4], 2, [(0, 1), (2, 3, 4)]),
        ([4, 6], 3, [(4,), (6,), (4,)]),
        ([3], 1, [(3,)]),
    ],
)
def test_cores_are_shared_evenly_and_nobody_gets_none(
    cores: list[int], workers: int, shares: list[tuple[int, ...]]
) -> None:
    assert [share_of_cores(cores, i, workers) for i in range(workers)] == shares


def test_the_first_worker_of_the_role_is_the_default() -> None:
    settings = worker_settings(SPLIT, None, ("prefill",))
    assert (settings.worker, settings.role) == ("prefill-0", "prefill")
    assert settings.kv_endpoint == "ipc:///run/d/kv-prefill-0.sock"
    assert settings.max_sequences == 32, "each running sequence may need a token per step"
    assert worker_settings(SPLIT, "prefill-1", ("prefill",)).worker == "prefill-1"


@pytest.mark.parametrize("name", ["prefill-2", "decode-0", "", "prefill"])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(BadConfig, match="`--name` may be prefill-0, prefill-1"):
        worker_settings(SPLIT, name, ("prefill",))


def test_a_role_the_deployment_does_not_have_is_refused() -> None:
    with pytest.raises(BadConfig, match="has no mixed worker"):
        worker_settings(SPLIT, None, ("mixed",))


def test_given_cores_must_exist_and_suffice_for_every_worker() -> None:
    mine = sorted(os.sched_getaffinity(0))[:1]

    def with_cores(*cores: tuple[int, ...]) -> Deployment:
        prefill = WorkerSection(count=2, cores=cores)
        workers = msgspec.structs.replace(SPLIT.workers, prefill=prefill)
        return msgspec.structs.replace(SPLIT, workers=workers)

    settings = worker_settings(with_cores(tuple(mine)), "prefill-0", ("prefill",))
    assert (settings.cores, settings.threads) == (tuple(mine), 1)
    with pytest.raises(BadConfig, match="has 1 entries, prefill-1 needs number 2"):
        worker_settings(with_cores(tuple(mine)), "prefill-1", ("prefill",))
    with pytest.raises(BadConfig, match="prefill-0 may only use cores"):
        worker_settings(with_cores((4096,)), "prefill-0", ("prefill",))


def test_a_small_models_decode_gets_no_more_threads_than_it_has_work_for() -> None:
    """64 cores gave 32 threads to 18 blocks of outputs: the rest only held the others up."""
    decode = msgspec.structs.replace(worker_settings(SPLIT, None, ("decode",)), threads=32)
    assert threads_for(decode, {"hidden_size": 576}).own == 18
    assert threads_for(decode, {"text_config": {"hidden_size": 576}}).own == 18
    assert threads_for(decode, {"hidden_size": 4096}).own == 32
    assert threads_for(decode, {}).own == 32
    prefill = msgspec.structs.replace(worker_settings(SPLIT, None, ("prefill",)), threads=32)
    assert threads_for(prefill, {"hidden_size": 576}).own == 32, "a chunk's rows are work, too"
    named = msgspec.structs.replace(decode, threads_named=True)
    assert threads_for(named, {"hidden_size": 576}).own == 32


def test_threads_in_the_file_are_what_the_file_says() -> None:
    decode = WorkerSection(threads=3)
    workers = msgspec.structs.replace(SPLIT.workers, decode=decode)
    deployment = msgspec.structs.replace(SPLIT, workers=workers)
    settings = worker_settings(deployment, None, ("decode",))
    assert (settings.threads, settings.threads_named) == (3, True)
    assert not worker_settings(SPLIT, None, ("decode",)).threads_named


def test_times_and_switches_come_from_their_sections() -> None:
    transfer = TransferSection(pipeline=False, lease=4.0, heartbeat=1.0)  # type: ignore[arg-type]
    deployment = msgspec.structs.replace(SPLIT, transfer=transfer)
    settings = worker_settings(deployment, None, ("decode",))
    assert (settings.pipeline, settings.lease, settings.heartbeat) == (False, 4.0, 1.0)
    assert settings.drain_timeout == deployment.router.drain_timeout
