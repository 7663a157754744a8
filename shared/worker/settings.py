"""What one worker process needs of the deployment file."""

import os
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from shared.config import Deployment, SecuritySection, TransferSection, WorkerSection
from shared.errors import BadConfig
from shared.fault_rules import FaultsSection
from shared.ids import WorkerId
from shared.kv.layout import KvDtype
from shared.messages.fleet import PipelineRule, Role
from shared.precision import Precision, chosen_precision, kv_dtype_for
from shared.runtime import (
    advertised,
    bulk_endpoint,
    kv_endpoint,
    router_workers_endpoint,
    runtime_dir,
    worker_ids,
)
from shared.worker.cores import (
    Share,
    physical_cores,
    read_siblings,
    share_of_machine,
    useful_threads,
)


class WorkerSettings(Struct, frozen=True, kw_only=True):
    """Single values, checked. ``cores`` are the CPUs to run on, ``kv_memory`` is in bytes.

    ``threads_named``: the deployment file says how many, so that none are left out or added.
    ``shares`` are the cores of all workers of the deployment, this one's at ``index``.
    """

    worker: WorkerId
    role: Role
    model: str
    device: str
    precision: Precision
    kv_dtype: KvDtype
    block_size: int
    max_model_len: int | None
    kv_memory: int
    max_batch_tokens: int
    max_sequences: int
    prefix_cache: bool
    pipeline: PipelineRule
    notify_layers: int | None
    lease: float
    heartbeat: float
    drain_timeout: float
    router_silence: float
    cores: tuple[int, ...]
    threads: int
    threads_named: bool
    borrow_cores: bool
    index: int
    shares: tuple[Share, ...]
    runtime_dir: str
    kv_endpoint: str
    kv_advertised: str
    bulk_endpoint: str
    bulk_advertised: str
    router_endpoint: str
    security: SecuritySection
    transfer: TransferSection
    faults: FaultsSection | None


def worker_settings(
    deployment: Deployment, name: str | None, roles: tuple[Role, ...]
) -> WorkerSettings:
    """Cut out the settings of worker ``name``, by default the first one of ``roles``.

    Raises:
        BadConfig: no such worker, or cores this machine does not have.
    """
    known = worker_ids(deployment)
    fitting = [worker for worker, role in known if role in roles]
    if not fitting:
        raise BadConfig(
            f"deployment {deployment.name!r} ({deployment.deployment_type}) has no "
            f"{' or '.join(roles)} worker"
        )
    worker = WorkerId(name) if name is not None else fitting[0]
    if worker not in fitting:
        raise BadConfig(f"no worker {worker!r} here; `--name` may be {', '.join(fitting)}")
    role = dict(known)[worker]
    section: WorkerSection = getattr(deployment.workers, role)
    index = [name for name, _ in known].index(worker)
    groups = _cores_here()
    share = _share(deployment, index, groups)
    precision = chosen_precision(section.precision, role, section.device)
    transfer = deployment.transfer
    return WorkerSettings(
        worker=worker,
        role=role,
        model=deployment.model.path,
        device=section.device,
        precision=precision,
        kv_dtype=kv_dtype_for(section.precision, section.kv_dtype),
        block_size=deployment.model.block_size,
        max_model_len=deployment.model.max_model_len,
        kv_memory=section.kv_memory,
        max_batch_tokens=section.max_batch_tokens,
        max_sequences=min(section.max_sequences, section.max_batch_tokens),
        prefix_cache=deployment.kv_reuse.prefix,
        pipeline=transfer.pipeline,
        notify_layers=None if transfer.notify_layers == "auto" else transfer.notify_layers,
        lease=transfer.lease,
        heartbeat=transfer.heartbeat,
        drain_timeout=deployment.router.drain_timeout,
        router_silence=deployment.router.worker_timeout / 2,
        cores=share.cores,
        threads=section.threads or share.threads,
        threads_named=section.threads is not None,
        borrow_cores=section.borrow_cores,
        index=index,
        shares=tuple(_share_if_here(deployment, i, groups) for i in range(len(known))),
        runtime_dir=str(runtime_dir(deployment)),
        kv_endpoint=kv_endpoint(deployment, worker),
        kv_advertised=advertised(deployment, kv_endpoint(deployment, worker)),
        bulk_endpoint=bulk_endpoint(deployment, worker),
        bulk_advertised=advertised(deployment, bulk_endpoint(deployment, worker)),
        router_endpoint=router_workers_endpoint(deployment),
        security=deployment.security,
        transfer=transfer,
        faults=deployment.faults,
    )


class Threads(Struct, frozen=True):
    """How many threads compute a model: ``own`` on the worker's cores, ``most`` with lent ones."""

    own: int
    most: int


def threads_for(settings: WorkerSettings, config: dict[str, Any]) -> Threads:
    """Return how many threads compute the model of ``config.json``.

    As many as the deployment file names, else at most those that have work in every layer.
    """
    most = _most_threads(settings, config)
    return Threads(min(settings.threads, most), most)


def _most_threads(settings: WorkerSettings, config: dict[str, Any]) -> int:
    if settings.threads_named or settings.device != "cpu":
        return settings.threads
    everywhere = sum(share.threads for share in settings.shares)
    most = max(settings.threads, everywhere) if settings.borrow_cores else settings.threads
    hidden = (config.get("text_config") or config).get("hidden_size")
    if settings.role != "decode" or not isinstance(hidden, int):
        return most
    return min(most, useful_threads(hidden))


def _cores_here() -> list[tuple[int, ...]]:
    """Return the logical CPUs that this process may use, core by core."""
    available = sorted(os.sched_getaffinity(0))
    return physical_cores(available, read_siblings(available))


def _share_if_here(deployment: Deployment, index: int, groups: Sequence[tuple[int, ...]]) -> Share:
    """Return any worker's share; none of one whose cores this machine does not have."""
    try:
        return _share(deployment, index, groups)
    except BadConfig:
        return Share((), 0)


def _share(deployment: Deployment, index: int, groups: Sequence[tuple[int, ...]]) -> Share:
    workers = worker_ids(deployment)
    worker, role = workers[index]
    section: WorkerSection = getattr(deployment.workers, role)
    if section.cores is None:
        return share_of_machine(groups, index, len(workers))
    number = int(worker.rpartition("-")[2])
    if number >= len(section.cores):
        raise BadConfig(
            f"`workers.{worker.rpartition('-')[0]}.cores` has {len(section.cores)} entries, "
            f"{worker} needs number {number + 1}"
        )
    cores = section.cores[number]
    available = sorted(cpu for group in groups for cpu in group)
    if not cores or not set(cores) <= set(available):
        raise BadConfig(f"{worker} may only use cores out of {available}, not {list(cores)}")
    return Share(cores, len(cores))
