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
    return _kv_tcp(deployment, worker, 0) or _ipc(deployment, f"kv-{worker}")


def bulk_endpoint(deployment: Deployment, worker: WorkerId) -> str:
    """Return the endpoint a worker binds for KV bytes on the ``host`` path."""
    return _kv_tcp(deployment, worker, 1) or _ipc(deployment, f"bulk-{worker}")


def advertised(deployment: Deployment, endpoint: str) -> str:
    """Return ``endpoint`` as other hosts must spell it."""
    host = deployment.endpoints.advertise
    if host is None or not endpoint.startswith("tcp://"):
        return endpoint
    name = f"[{host}]" if ":" in host else host
    return f"tcp://{name}:{endpoint.rpartition(':')[2]}"


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
    """Return boot + pid namespace + start of its first process.

    Processes with the same one can open each other's memory. Addresses and host names prove
    nothing: containers that share a pid namespace have names of their own.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return HostId(f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}:{_first_process_start()}")


def _first_process_start() -> str:
    """Return clock ticks since boot, "-" where proc hides the process (proc(5), hidepid)."""
    try:
        fields = Path("/proc/1/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return "-"
    return fields[19].decode()


def _kv_tcp(deployment: Deployment, worker: WorkerId, offset: int) -> str | None:
    base = deployment.endpoints.kv
    if base is None:
        return None
    host, _, port = base.rpartition(":")
    index = [name for name, _ in worker_ids(deployment)].index(worker)
    return f"{host}:{int(port) + 2 * index + offset}"


def _ipc(deployment: Deployment, name: str) -> str:
    return f"ipc://{runtime_dir(deployment)}/{name}.sock"
