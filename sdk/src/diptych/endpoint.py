"""Where the gateway is and how to speak to it in private."""

import ipaddress
import os
import tempfile
from pathlib import Path

import zmq
from msgspec import Struct

from diptych.errors import InvalidRequest


class Curve(Struct, frozen=True):
    """CURVE keys as 40-character Z85 text: the gateway's public key and one's own pair."""

    server: bytes
    public: bytes
    secret: bytes

    @classmethod
    def load(cls, server_public: str | Path, client_secret: str | Path) -> "Curve":
        """Read the gateway's public key file and the client's secret key file.

        Raises:
            InvalidRequest: a file cannot be read or holds no key.
        """
        secret = _read_key(Path(client_secret))
        return cls(_read_key(Path(server_public)), zmq.curve_public(secret), secret)

    @classmethod
    def from_directory(cls, directory: str | Path) -> "Curve":
        """Read what ``diptych keys DIRECTORY`` wrote. Raises ``InvalidRequest``."""
        root = Path(directory).expanduser()
        return cls.load(root / "server.public", root / "clients" / "fleet.secret")


def default_endpoint(deployment: str = "local") -> str:
    """Return the endpoint of a deployment on this machine that runs as the same user."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return f"ipc://{base}/diptych-{os.getuid()}/{deployment}/client.sock"


def check_endpoint(endpoint: str, curve: Curve | None) -> None:
    """Refuse what cannot work before a thread is started.

    Raises:
        InvalidRequest: unknown transport, over-long path, or another machine without keys.
    """
    scheme, _, address = endpoint.partition("://")
    if scheme not in ("tcp", "ipc") or not address:
        message = f"endpoint {endpoint!r} must be tcp://HOST:PORT or ipc:///ABSOLUTE/PATH.sock"
        raise InvalidRequest(message, param="endpoint")
    if scheme == "ipc" and len(os.fsencode(address)) > 107:
        raise InvalidRequest(f"ipc path {address!r} is longer than 107 bytes", param="endpoint")
    if scheme == "tcp":
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise InvalidRequest(f"endpoint {endpoint!r} needs a host and a port", param="endpoint")
        if curve is None and not _is_loopback(host):
            message = f"{endpoint} is another machine and needs `curve` keys (`diptych keys DIR`)"
            raise InvalidRequest(message, param="curve")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _read_key(path: Path) -> bytes:
    try:
        key = path.expanduser().read_bytes().strip()
        zmq.curve_public(key)
    except OSError as error:
        message = f"cannot read key {path}: {error.strerror}"
        raise InvalidRequest(message, param="curve") from error
    except (ValueError, zmq.ZMQError) as error:
        message = f"{path} holds no 40-character CURVE key"
        raise InvalidRequest(message, param="curve") from error
    return key
