"""Check that other machines find this one's workers where ``endpoints.advertise`` sends them."""

import ipaddress
import socket
from typing import Final

import psutil

from shared.config import Deployment
from shared.errors import ResourceMissing
from shared.ids import WorkerId
from shared.runtime import advertised, bulk_endpoint, kv_endpoint, runtime_dir, worker_ids
from shared.units import parse_address
from tools.doctor.finding import Finding, fail, ok, warn

_KEY: Final = "`endpoints.advertise`"
_PATIENCE: Final = 1.0
"""Seconds for one connection; workers listen on this very machine."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def check_advertise(deployment: Deployment) -> list[Finding]:
    """Resolve the name, and connect to it where workers of this machine run.

    Without ``endpoints.kv`` nothing is advertised: no finding.
    """
    host, listens = deployment.endpoints.advertise, deployment.endpoints.kv
    if host is None or listens is None:
        return []
    try:
        found = resolve(host)
    except ResourceMissing as error:
        return [fail("advertise", error.message)]
    text = ", ".join(map(str, found))
    if any(address.is_unspecified for address in found):
        return [fail("advertise", f"{_KEY}: {host} is {text}: an address for listening only")]
    listens_here = _loopback(parse_address(listens.removeprefix("tcp://"))[0])
    if any(address.is_loopback for address in found) and not listens_here:
        why = "which every machine takes for itself"
        return [warn("advertise", f"{_KEY}: {host} is {text}, {why}: others reach no worker here")]
    local = any(address in own_addresses() for address in found)
    running = _running(deployment)
    deaf = [line for name in running for line in _unreached(deployment, name)]
    if deaf:
        level = fail if local else warn
        return [level("advertise", f"{'; '.join(deaf)}: is a firewall or port mapping in the way?")]
    if not local:
        why = "no address of this machine, which is right only behind NAT or a port mapping"
        return [warn("advertise", f"{_KEY}: {host} is {text}, {why}")]
    reached = f"; {', '.join(running)} can be reached there" if running else ""
    return [ok("advertise", f"{host} is {text}{reached}")]


def resolve(host: str) -> list[Address]:
    """Return the addresses of a host name. Raises ``ResourceMissing`` if there are none."""
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ResourceMissing(
            f"{_KEY}: {host} does not resolve ({why}); write this machine's address or a name "
            "that the others know"
        ) from error
    return [ipaddress.ip_address(str(place[0]).partition("%")[0]) for *_, place in infos]


def own_addresses() -> set[Address]:
    """Return the addresses of this machine's interfaces."""
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        ipaddress.ip_address(entry.address.partition("%")[0])
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in families
    }


def _running(deployment: Deployment) -> list[WorkerId]:
    place = runtime_dir(deployment)
    return [name for name, _ in worker_ids(deployment) if (place / f"{name}.ready").exists()]


def _unreached(deployment: Deployment, worker: WorkerId) -> list[str]:
    """Return what of a worker's links does not take a connection."""
    endpoints = [kv_endpoint(deployment, worker)]
    if deployment.transfer.path != "ipc":
        endpoints.append(bulk_endpoint(deployment, worker))
    out = []
    for endpoint in (advertised(deployment, endpoint) for endpoint in endpoints):
        try:
            place = parse_address(endpoint.removeprefix("tcp://"))
            socket.create_connection(place, timeout=_PATIENCE).close()
        except OSError as error:
            out.append(f"{worker} runs, but {endpoint} takes no connection ({error})")
    return out


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
