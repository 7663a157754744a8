"""The process between two hosts: makes namespace and devices, carries packets, removes it all.

``python -m tools.slow_link.relay SPEC`` prints a line of JSON once the link is up and ends with
its standard input; the devices end with it, whatever kills it.
"""

import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import time
from typing import Final

import msgspec
from msgspec import Struct

from shared.errors import ResourceMissing
from tools.slow_link.shaping import Direction, LinkProfile

_TUN: Final = "/dev/net/tun"
_SET_IFF: Final = 0x400454CA
_SET_OFFLOAD: Final = 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_OFFLOAD_CHECKSUM: Final = 1
_PACKET: Final = 66 << 10
_BUDGET: Final = 32
_PREFIX: Final = 30
_PRIORITY: Final = -15  # a wire does not wait for a core


class LinkSpec(Struct, frozen=True, kw_only=True):
    """``name`` is that of the new namespace and, here, of the device: 14 characters at most.

    ``near`` is this side's address, ``far`` the namespace's; both in one /30.
    """

    name: str
    near: str
    far: str
    mtu: int
    profile: LinkProfile


class LinkUp(Struct, frozen=True):
    """Packets pass, or why they never will."""

    error: str | None = None


def ip(*words: str) -> None:
    """Run ``ip``. Raises ``ResourceMissing`` with what it said."""
    try:
        done = subprocess.run(
            ["ip", *words], capture_output=True, text=True, timeout=10, check=False
        )
    except FileNotFoundError:
        raise ResourceMissing("a simulated link needs iproute2") from None
    if done.returncode != 0:
        why = done.stderr.strip() or f"ip {' '.join(words)} failed"
        raise ResourceMissing(f"a simulated link needs root and network namespaces: {why}")


def far_device(name: str) -> str:
    """Return the name of the device at the far end."""
    return f"{name}f"


def main() -> None:
    """Be the link until standard input ends."""
    spec = msgspec.json.decode(sys.argv[1], type=LinkSpec)
    # A signal to the whole group must not leave the namespace behind: who made us ends us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    devices: list[int] = []
    made = False
    try:
        try:
            devices += [_open_device(spec.name), _open_device(far_device(spec.name))]
            ip("netns", "add", spec.name)
            made = True
            _join(spec)
        except ResourceMissing as error:
            _say(LinkUp(error.message))
            return
        _say(LinkUp())
        _carry(devices[0], devices[1], spec.profile)
    finally:
        for device in devices:
            os.close(device)
        if made:
            ip("netns", "del", spec.name)


def _say(line: LinkUp) -> None:
    print(msgspec.json.encode(line).decode(), flush=True)


def _open_device(name: str) -> int:
    """Return a TUN device whose packets carry the kernel's note on checksums, which it reads back:
    so nobody computes any."""
    try:
        device = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
    except OSError as error:
        raise ResourceMissing(f"a simulated link needs {_TUN}: {error.strerror}") from None
    try:
        request = struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR)
        fcntl.ioctl(device, _SET_IFF, request)
        fcntl.ioctl(device, _SET_OFFLOAD, _OFFLOAD_CHECKSUM)
    except OSError as error:
        os.close(device)
        raise ResourceMissing(f"a simulated link needs root: {error.strerror}") from None
    return device


def _join(spec: LinkSpec) -> None:
    """Give both ends their address; routes of /30 come with it."""
    far = far_device(spec.name)
    ip("link", "set", far, "netns", spec.name)
    for place, device, address in (
        ((), spec.name, spec.near),
        (("-n", spec.name), far, spec.far),
    ):
        ip(*place, "addr", "add", f"{address}/{_PREFIX}", "dev", device)
        ip(*place, "link", "set", device, "mtu", str(spec.mtu), "txqueuelen", "4096", "up")
    ip("-n", spec.name, "link", "set", "lo", "up")


class _Buffers:
    """Packets' memory, used again last in, first out: fresh pages cost more than the copy."""

    def __init__(self) -> None:
        self._spare: list[bytearray] = []

    def read(self, device: int) -> memoryview | None:
        """Return the next packet, None where none waits or the device is down."""
        buffer = self._spare.pop() if self._spare else bytearray(_PACKET)
        try:
            size = os.readv(device, [buffer])
        except OSError:
            self._spare.append(buffer)
            return None
        return memoryview(buffer)[:size]

    def give_back(self, packet: memoryview) -> None:
        """The packet went on or was lost."""
        assert isinstance(packet.obj, bytearray)
        self._spare.append(packet.obj)


def _carry(near: int, far: int, profile: LinkProfile) -> None:
    ways = (
        (near, far, Direction(profile, profile.seed)),
        (far, near, Direction(profile, profile.seed + 1)),
    )
    buffers = _Buffers()
    os.setpriority(os.PRIO_PROCESS, 0, _PRIORITY)
    stop = sys.stdin.fileno()
    while True:
        now = time.monotonic()
        waits = [wait for _, _, way in ways if (wait := way.wait(now)) is not None]
        ready, _, _ = select.select([near, far, stop], [], [], min(waits, default=None))
        if stop in ready:
            return
        for source, target, way in ways:
            if source in ready:
                _take_in(source, way, buffers)
            for packet in way.due(time.monotonic()):
                _write(target, packet)
                buffers.give_back(packet)


def _take_in(device: int, way: Direction, buffers: _Buffers) -> None:
    for _ in range(_BUDGET):
        packet = buffers.read(device)
        if packet is None:
            return
        if not way.take(packet, time.monotonic()):
            buffers.give_back(packet)


def _write(device: int, packet: memoryview) -> None:
    try:
        os.write(device, packet)
    except OSError:  # the device is down, or its queue is full
        return


if __name__ == "__main__":
    main()
