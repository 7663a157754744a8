"""Opens sockets: every option that libzmq's defaults get wrong, and safe ipc files."""

import errno
from collections.abc import Callable
from pathlib import Path

import zmq

from shared.errors import BadConfig, ResourceMissing
from shared.transport.admission import Admission
from shared.transport.ipc_file import check_path, listen, remove_own
from shared.transport.pump import LinkLimits
from shared.transport.security import CurveClient

_LINGER = 500
_OPTIONS = {
    zmq.LINGER: _LINGER,
    zmq.HEARTBEAT_IVL: 1000,
    zmq.HEARTBEAT_TIMEOUT: 5000,
    zmq.HEARTBEAT_TTL: 5000,
    zmq.HANDSHAKE_IVL: 5000,
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 30,
    zmq.TCP_KEEPALIVE_INTVL: 10,
    zmq.TCP_KEEPALIVE_CNT: 3,
}
"""Times in milliseconds, except keep-alive in seconds."""

Context = zmq.Context[zmq.Socket[bytes]]


class Listener:
    """A bound ROUTER socket and, for ipc, the file that belongs to it."""

    def __init__(self, socket: "zmq.Socket[bytes]", file: tuple[Path, int] | None) -> None:
        self.socket = socket
        self.endpoint = socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._file = file

    def close(self) -> None:
        """Remove the file if it still is ours, then close the socket. Idempotent."""
        if self.socket.closed:
            return
        # In this order: while the socket listens nobody takes the path over.
        if self._file is not None:
            remove_own(*self._file)
        self.socket.close()


def bind(
    context: Context, endpoint: str, limits: LinkLimits, admission: Admission | None
) -> Listener:
    """Open a ROUTER on ``endpoint`` (tcp port 0 picks a free one).

    Raises:
        ResourceMissing: address in use or not available, ipc path too long or not safe, or no
            descriptor is left.
        BadConfig: not an endpoint.
    """
    socket = _socket(context, zmq.ROUTER)
    file: tuple[Path, int] | None = None
    try:
        _set_options(socket, endpoint, limits)
        # Frames up to twice the limit are counted by the link; larger ones cut the peer off.
        socket.setsockopt(zmq.MAXMSGSIZE, 2 * limits.max_frame)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A routing id carries an incarnation, so a second connection is the same process
        # whose first one died unseen; without this libzmq ignores it.
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if admission is not None:
            admission.apply(socket)
        if endpoint.startswith("ipc://"):
            path = _path(endpoint)
            descriptor, inode = listen(path)
            file = path, inode
            socket.setsockopt(zmq.USE_FD, descriptor)
        _open(socket.bind, endpoint)
        return Listener(socket, file)
    except BaseException:
        if file is not None:
            remove_own(*file)
        socket.close(linger=0)
        raise


def connect(
    context: Context,
    endpoint: str,
    identity: bytes,
    limits: LinkLimits,
    security: CurveClient | None,
) -> "zmq.Socket[bytes]":
    """Open a DEALER towards ``endpoint``; nobody needs to be there yet.

    Raises:
        ResourceMissing: ipc path too long, or no descriptor is left.
        BadConfig: not an endpoint, or an identity libzmq cannot carry.
    """
    if not 0 < len(identity) < 256 or identity[0] == 0:
        raise BadConfig(f"routing id {identity!r} must have 1 to 255 bytes and not start with 0")
    socket = _socket(context, zmq.DEALER)
    try:
        _set_options(socket, endpoint, limits)
        # No MAXMSGSIZE here: passing it ends libzmq's session for good, without a reconnect.
        # The link counts and drops such frames; a RouterLink never sends them.
        socket.setsockopt(zmq.ROUTING_ID, identity)
        # Nothing is queued to a peer that is away; the link's own bounded outbox keeps it.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        if security is not None:
            socket.setsockopt(zmq.CURVE_PUBLICKEY, security.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, security.secret)
            socket.setsockopt(zmq.CURVE_SERVERKEY, security.server)
        if endpoint.startswith("ipc://"):
            check_path(_path(endpoint))
        _open(socket.connect, endpoint)
        return socket
    except BaseException:
        socket.close(linger=0)
        raise


def _socket(context: Context, kind: zmq.SocketType) -> "zmq.Socket[bytes]":
    try:
        return context.socket(kind)
    except zmq.ZMQError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        text = "no socket can be opened: this process has as many as it may (`ulimit -n`)"
        raise ResourceMissing(text) from None


def _set_options(socket: "zmq.Socket[bytes]", endpoint: str, limits: LinkLimits) -> None:
    for option, value in _OPTIONS.items():
        socket.setsockopt(option, value)
    socket.setsockopt(zmq.SNDHWM, limits.hwm)
    socket.setsockopt(zmq.RCVHWM, limits.hwm)
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))


def _path(endpoint: str) -> Path:
    text = endpoint.removeprefix("ipc://")
    if not text.startswith("/"):
        raise BadConfig(f"endpoint {endpoint!r} needs an absolute path: ipc:///run/x.sock")
    return Path(text)


def _open(call: Callable[[str], object], endpoint: str) -> None:
    try:
        call(endpoint)
    except zmq.ZMQError as error:
        if error.errno == zmq.EADDRINUSE:
            raise ResourceMissing(f"{endpoint} is in use by another process") from None
        if error.errno in (zmq.EADDRNOTAVAIL, errno.ENODEV, errno.EACCES):
            raise ResourceMissing(f"cannot open {endpoint}: {error.strerror}") from None
        raise BadConfig(f"{endpoint!r} is not an endpoint: {error.strerror}") from None
