"""What one worker process needs of the deployment file."""

import os

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


class WorkerSettings(Struct, frozen=True, kw_only=True):
    """Single values, checked. ``cores`` are the CPUs to run on, ``kv_memory`` is in bytes."""

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
    cores = _cores(deployment, section, worker)
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
        cores=cores,
        threads=section.threads or len(cores),
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


def share_of_cores(available: list[int], index: int, count: int) -> tuple[int, ...]:
    """Return the ``index``-th of ``count`` even shares; shares overlap when cores are few."""
    if count > len(available):
        return (available[index % len(available)],)
    bounds = [i * len(available) // count for i in (index, index + 1)]
    return tuple(available[bounds[0] : bounds[1]])


def _cores(deployment: Deployment, section: WorkerSection, worker: WorkerId) -> tuple[int, ...]:
    available = sorted(os.sched_getaffinity(0))
    workers = worker_ids(deployment)
    if section.cores is None:
        index = [name for name, _ in workers].index(worker)
        return share_of_cores(available, index, len(workers))
    number = int(worker.rpartition("-")[2])
    if number >= len(section.cores):
        raise BadConfig(
            f"`workers.{worker.rpartition('-')[0]}.cores` has {len(section.cores)} entries, "
            f"{worker} needs number {number + 1}"
        )
    cores = section.cores[number]
    if not cores or not set(cores) <= set(available):
        raise BadConfig(f"{worker} may only use cores out of {available}, not {list(cores)}")
    return cores
