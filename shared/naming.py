"""``--name auto``: a worker takes the first free name of its role, for replicas of a container.

A name is held by a lock on ``<runtime_dir>/<name>.lock`` that the kernel drops with its process,
however that ends; a replica started later takes the name over.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from shared.config import Deployment, WorkerSection
from shared.errors import BadConfig, ResourceMissing
from shared.ids import WorkerId
from shared.messages.fleet import Role
from shared.runtime import runtime_dir, worker_ids

AUTO: Final = "auto"
MAX_REPLICAS: Final = 256


@contextmanager
def worker_name(
    deployment: Deployment, name: str | None, roles: tuple[Role, ...]
) -> Iterator[tuple[Deployment, str | None]]:
    """Give the deployment and the name to use in it while the block runs.

    Another name than ``auto`` comes back as it is. For ``auto`` the deployment's ``count`` is
    raised where more replicas were started than the file says.

    Raises:
        BadConfig: the deployment has no worker of ``roles``.
        ResourceMissing: no name is free, or the run directory cannot be used.
    """
    if name != AUTO:
        yield deployment, name
        return
    role = _role(deployment, roles)
    directory = runtime_dir(deployment)
    index, descriptor = _first_free(directory, role)
    try:
        yield _with_count(deployment, role, index + 1), WorkerId(f"{role}-{index}")
    finally:
        os.close(descriptor)


def _role(deployment: Deployment, roles: tuple[Role, ...]) -> Role:
    for _, role in worker_ids(deployment):
        if role in roles:
            return role
    raise BadConfig(f"deployment {deployment.name!r} has no {' or '.join(roles)} worker")


def _first_free(directory: Path, role: Role) -> tuple[int, int]:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for index in range(MAX_REPLICAS):
            path = directory / f"{role}-{index}.lock"
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                continue
            return index, descriptor
    except OSError as error:
        raise ResourceMissing(f"cannot take a name in {directory}: {error}") from error
    raise ResourceMissing(f"all {MAX_REPLICAS} names of {role} workers are taken in {directory}")


def _with_count(deployment: Deployment, role: Role, count: int) -> Deployment:
    section: WorkerSection = getattr(deployment.workers, role)
    section = msgspec.structs.replace(section, count=max(count, section.count))
    workers = msgspec.structs.replace(deployment.workers, **{role: section})
    return msgspec.structs.replace(deployment, workers=workers)
