"""A second host on this machine: a network namespace at the far end of a simulated link."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from shared.errors import ResourceMissing
from tools.slow_link.relay import LinkSpec, LinkUp, far_device, ip
from tools.slow_link.shaping import LinkProfile

WIRE_MTU: Final = 1500
LARGE_MTU: Final = 65000
"""Fewer, larger packets: what a process can carry at 10 Gbit/s."""
_SPACES: Final = Path("/run/netns")


class Hosts(Struct, frozen=True):
    """``near`` is this host's address on the link; ``far`` is that of ``device`` in the
    namespace ``space``."""

    space: str
    device: str
    near: str
    far: str

    @property
    def inside(self) -> tuple[str, ...]:
        """What stands before a command that is to run on the far host."""
        return ("ip", "netns", "exec", self.space)

    def cable(self, state: str) -> None:
        """Set the link ``down`` or ``up``, at the far end: here the route stays, and nothing else
        that answers connections takes its place."""
        ip("-n", self.space, "link", "set", self.device, state)


@contextmanager
def slow_link(profile: LinkProfile, mtu: int) -> Iterator[Hosts]:
    """Join a new namespace to this one as long as the context lasts; one per process at a time.

    Its addresses are a /30 of 10.214.0.0/16 that follows from this process's pid, so that two
    processes may do so at once.

    Raises:
        ResourceMissing: no rights, no ``ip``, no namespaces or no TUN devices here.
    """
    _remove_orphans()
    name = f"dtp{os.getpid() % 10**8}"
    high, low = divmod(os.getpid() % 2**14 * 4, 256)
    near, far = (f"10.214.{high}.{low + host}" for host in (1, 2))
    hosts = Hosts(name, far_device(name), near, far)
    spec = LinkSpec(name=name, near=hosts.near, far=hosts.far, mtu=mtu, profile=profile)
    command = [sys.executable, "-m", "tools.slow_link.relay", msgspec.json.encode(spec).decode()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as relay:
        assert relay.stdin is not None
        assert relay.stdout is not None
        line = relay.stdout.readline()
        if not line:
            raise ResourceMissing("the simulated link did not come up")
        up = msgspec.json.decode(line, type=LinkUp)
        if up.error is not None:
            raise ResourceMissing(up.error)
        try:
            yield hosts
        finally:
            relay.stdin.close()
            if relay.wait(timeout=20) != 0:
                _remove(name)


def _remove_orphans() -> None:
    """Remove the namespaces of processes that were killed together with their relay.

    Devices are gone with a relay, but a namespace has a name that nothing takes away.
    """
    for place in _SPACES.glob("dtp*"):
        owner = re.fullmatch(r"dtp([0-9]+)", place.name)
        if owner is not None and not Path(f"/proc/{owner[1]}").exists():
            _remove(place.name)


def _remove(name: str) -> None:
    with suppress(ResourceMissing):  # its relay, or another process, was faster
        ip("netns", "del", name)
