"""``diptych drain`` and ``diptych role``: empty a worker, and let it serve in some role."""

import time

import msgspec
from rich.console import Console

import diptych
from shared.config import Deployment
from shared.errors import NotFound, ResourceMissing
from shared.messages.fleet import FleetStatus, Role, WorkerStatus
from tools.running import client, require_gateway

_POLL = 0.2
_QUERY_TIMEOUT = 5.0


def drain(deployment: Deployment, worker: str, console: Console, *, timeout: float) -> None:
    """Have a worker finish what it runs and wait until it is empty.

    Raises:
        NotFound: there is no such worker.
        ResourceMissing: the deployment does not run, the key is not an operator's, or the
            worker is not empty after ``timeout`` seconds; it then goes on draining.
    """
    found = _order(deployment, worker, None, timeout)
    console.print(
        f"{worker} is drained and stays so; it serves again after: "
        f"diptych role {worker} {found.role}",
        soft_wrap=True,
    )


def change_role(
    deployment: Deployment, worker: str, role: Role, console: Console, *, timeout: float
) -> None:
    """Empty a worker and have it serve in ``role``, which may be its own. Errors as ``drain``."""
    _order(deployment, worker, role, timeout)
    console.print(f"{worker} serves as {role}")


def _order(deployment: Deployment, worker: str, role: Role | None, timeout: float) -> WorkerStatus:
    require_gateway(deployment)
    deadline = time.monotonic() + timeout
    try:
        with client(deployment, connect_timeout=_QUERY_TIMEOUT, operator=True) as link:
            fleet = link.drain(worker, role=role, timeout=_QUERY_TIMEOUT)
            while True:
                found = _worker(fleet, worker)
                if found.drained if role is None else _serves(found, role):
                    return found
                if time.monotonic() >= deadline:
                    raise ResourceMissing(
                        f"{worker} still has work after {timeout:g} s; it goes on draining"
                    )
                time.sleep(_POLL)
                fleet = link.status(timeout=_QUERY_TIMEOUT)
    except diptych.NotFound as error:
        raise NotFound(str(error)) from error
    except diptych.DiptychError as error:
        raise ResourceMissing(str(error)) from error


def _worker(fleet: dict[str, object], name: str) -> WorkerStatus:
    for worker in msgspec.convert(fleet, FleetStatus).workers:
        if worker.worker == name:
            return worker
    raise NotFound(f"worker {name} has left")


def _serves(worker: WorkerStatus, role: Role) -> bool:
    return worker.role == role and worker.health == "ready"
