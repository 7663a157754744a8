"""Check what one deployment needs: memory, ports, socket paths, keys."""

import socket
from pathlib import Path

from shared.config import Deployment, WorkerSection
from shared.errors import BadConfig, ResourceMissing
from shared.front_door import check_front_door
from shared.kv.memory import available_memory
from shared.messages.fleet import Role
from shared.precision import chosen_precision
from shared.runtime import (
    client_endpoint,
    kv_endpoint,
    router_gateways_endpoint,
    router_workers_endpoint,
    worker_ids,
)
from shared.transport.ipc_file import check_path
from shared.transport.security import security_for
from shared.units import parse_address
from tools.doctor.finding import Finding, attempt

_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "int8": 1.0, "int4": 0.625, "fp8": 1.0}
"""Of one weight; int4 has its groups' two numbers in it."""
_WORKER_BASE = 512 << 20
"""Bytes of a worker without weights and KV: Python, torch, activations."""


def check_memory(deployment: Deployment, parameters: int) -> str:
    """Return the memory sum. Raises ``ResourceMissing`` when it exceeds what is available."""
    needed, parts = 0, []
    roles: tuple[Role, ...] = ("prefill", "decode", "mixed")
    for role in roles:
        section: WorkerSection | None = getattr(deployment.workers, role)
        count = sum(r == role for _, r in worker_ids(deployment))
        if section is None or not count:
            continue
        if section.device != "cpu":  # weights and KV are in the GPU's memory
            needed += count * _WORKER_BASE
            parts.append(f"{count} x {role} on {section.device}: {_mib(_WORKER_BASE)}")
            continue
        precision = chosen_precision(section.precision, role, section.device)
        weights = int(parameters * _BYTES[precision])
        each = weights + section.kv_memory + _WORKER_BASE
        needed += count * each
        parts.append(
            f"{count} x {role}: weights {_mib(weights)} + KV {_mib(section.kv_memory)} "
            f"+ {_mib(_WORKER_BASE)}"
        )
    have = available_memory()
    total = f"needs about {_mib(needed)} ({'; '.join(parts)}), {_mib(have)} available"
    if needed > have:
        raise ResourceMissing(f"too little memory: {total}; lower `kv_memory` or `count`")
    return total


def check_port(address: str) -> str:
    """Return the address. Raises ``ResourceMissing`` if ``host:port`` cannot be bound."""
    try:
        host, port = parse_address(address)
    except ValueError as error:
        raise BadConfig(str(error)) from error
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, proto, _, place = infos[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except OSError as error:
        raise ResourceMissing(
            f"{address} cannot be opened: {error.strerror or error}; stop what listens there, "
            "or set another address in the deployment file"
        ) from error
    return f"{address} is free"


def check_endpoints(deployment: Deployment) -> str:
    """Check every control endpoint: path length, free port, keys where they are needed."""
    endpoints = [
        router_gateways_endpoint(deployment),
        router_workers_endpoint(deployment),
        client_endpoint(deployment),
        *(kv_endpoint(deployment, name) for name, _ in worker_ids(deployment)),
    ]
    longest = 0
    for endpoint in endpoints:
        security_for(endpoint, deployment.security, "bind")
        scheme, _, address = endpoint.partition("://")
        if scheme == "ipc":
            check_path(Path(address))
            longest = max(longest, len(address))
        elif not address.endswith(":0"):
            check_port(address.replace("*", "0.0.0.0", 1))
    return f"{len(endpoints)} endpoints, longest socket path {longest} of 107 bytes"


def check_gateway(deployment: Deployment) -> str:
    """Check addresses, keys and operators as the gateway does. Raises ``BadConfig``."""
    check_front_door(deployment)
    keys = deployment.gateway.api_keys
    return "asks for no key" if keys is None else f"{len(keys)} API keys"


def check_machine_for(deployment: Deployment) -> list[Finding]:
    """Run the checks of this module that need no model."""
    return [
        attempt("http", lambda: check_port(deployment.gateway.http)),
        attempt("gateway", lambda: check_gateway(deployment)),
        attempt("endpoints", lambda: check_endpoints(deployment)),
    ]


def _mib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size >> 20} MiB"
