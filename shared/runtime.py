"""Where the processes of one deployment meet: run directory and control endpoints."""

import os
import tempfile
from pathlib import Path

from shared.config import Deployment
from shared.ids import HostId, WorkerId
from shared.messages.fleet import Role


def runtime_dir(deployment: Deployment) -> Path:
    """Return the directory of sockets and logs; short, since ipc paths end at 107 bytes."""
    if deployment.runtime_dir is not None:
        return Path(deployment.runtime_dir).expanduser().absolute()
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(base) / f"diptych-{os.getuid()}" / deployment.name


def router_gateways_endpoint(deployment: Deployment) -> str:
    """Return the endpoint the router binds for gateways."""
    return deployment.endpoints.router_gateways or _ipc(deployment, "router-gateways")


def router_workers_endpoint(deployment: Deployment) -> str:
    """Return the endpoint the router binds for workers."""
    return deployment.endpoints.router_workers or _ipc(deployment, "router-workers")


def kv_endpoint(deployment: Deployment, worker: WorkerId) -> str:
    """Return the endpoint a worker binds for its KV link."""
    return _ipc(deployment, f"kv-{worker}")


def client_endpoint(deployment: Deployment) -> str:
    """Return the endpoint the gateway binds for the ZeroMQ SDK."""
    return deployment.gateway.zmq or _ipc(deployment, "client")


def worker_ids(deployment: Deployment) -> list[tuple[WorkerId, Role]]:
    """Return the name and role of every configured worker, e.g. ``("prefill-0", "prefill")``."""
    roles: tuple[Role, ...] = (
        ("mixed",) if deployment.deployment_type == "colocated" else ("prefill", "decode")
    )
    out: list[tuple[WorkerId, Role]] = []
    for role in roles:
        section = getattr(deployment.workers, role)
        out += [(WorkerId(f"{role}-{i}"), role) for i in range(section.count)]
    return out


def host_id() -> HostId:
    """Return machine + boot + pid namespace; addresses are no proof of sharing memory."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return HostId(f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}:{os.uname().nodename}")


def _ipc(deployment: Deployment, name: str) -> str:
    return f"ipc://{runtime_dir(deployment)}/{name}.sock"
