"""CURVE for links: keys on disk, which endpoint needs them, and who may connect."""

import ipaddress
import os
from pathlib import Path
from typing import Literal, overload

import zmq
from msgspec import Struct

from shared.config import SecuritySection
from shared.errors import BadConfig, ResourceMissing

Side = Literal["bind", "connect"]

_KEY_FILES = (
    "server.secret",
    "server.public",
    "clients/fleet.secret",
    "clients/fleet.public",
)


class CurveServer(Struct, frozen=True, kw_only=True):
    """The binding side: its secret key and the public keys that may connect (Z85 text)."""

    secret: bytes
    allowed: frozenset[bytes]


class CurveClient(Struct, frozen=True, kw_only=True):
    """The connecting side: its own key pair and the server's public key (Z85 text)."""

    public: bytes
    secret: bytes
    server: bytes


LinkSecurity = CurveServer | CurveClient


def generate_keys(directory: str | Path) -> Path:
    """Write the key pairs of one fleet and return the directory.

    ``server.secret``/``server.public`` belong to every binding socket,
    ``clients/fleet.secret``/``clients/fleet.public`` to every connecting one. Whoever has a
    public key in ``clients/*.public`` may connect. All files are 0600, directories 0700.

    Raises:
        ResourceMissing: a key file exists already (none is overwritten), or cannot be written.
    """
    root = Path(directory).expanduser().absolute()
    server_public, server_secret = zmq.curve_keypair()
    client_public, client_secret = zmq.curve_keypair()
    made = (server_secret, server_public, client_secret, client_public)
    files = {root / name: key for name, key in zip(_KEY_FILES, made, strict=True)}
    for path in files:
        if path.exists():
            raise ResourceMissing(f"{path} exists already; keys are never overwritten")
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        (root / "clients").mkdir(mode=0o700, exist_ok=True)
        for path, key in files.items():
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(key + b"\n")
    except OSError as error:
        raise ResourceMissing(f"cannot write keys to {root}: {error}") from error
    return root


def have_keys(directory: str | Path) -> bool:
    """Tell whether ``generate_keys`` has run to its end there."""
    root = Path(directory).expanduser()
    return all((root / name).is_file() for name in _KEY_FILES)


@overload
def security_for(
    endpoint: str, section: SecuritySection, side: Literal["bind"]
) -> CurveServer | None: ...
@overload
def security_for(
    endpoint: str, section: SecuritySection, side: Literal["connect"]
) -> CurveClient | None: ...
def security_for(endpoint: str, section: SecuritySection, side: Side) -> LinkSecurity | None:
    """Return the keys a link on ``endpoint`` must use, or None for a plain link.

    TCP is encrypted whenever ``security.keys`` is set, on loopback too, so that both ends of
    ``tcp://0.0.0.0`` and ``tcp://127.0.0.1`` agree; ipc and inproc only with ``curve: always``.

    Raises:
        BadConfig: an unknown transport, or an endpoint that needs keys and has none.
    """
    scheme, _, address = endpoint.partition("://")
    if scheme not in ("tcp", "ipc", "inproc") or not address:
        raise BadConfig(
            f"endpoint {endpoint!r} must be tcp://HOST:PORT or ipc:///ABSOLUTE/PATH.sock"
        )
    if section.keys is None:
        if section.curve == "always":
            raise BadConfig(
                "`security.curve: always` needs `security.keys`: run `diptych keys DIR`"
            )
        if scheme == "tcp" and not _is_loopback(address):
            raise BadConfig(
                f"{endpoint} is reachable from other machines and needs keys: run "
                "`diptych keys DIR` and set `security.keys: DIR` in the deployment file"
            )
        return None
    if scheme != "tcp" and section.curve != "always":
        return None
    root = Path(section.keys).expanduser()
    return _load_server(root) if side == "bind" else _load_client(root)


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    if host in ("localhost", "lo"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _load_server(root: Path) -> CurveServer:
    allowed = frozenset(_read_key(path) for path in sorted(root.glob("clients/*.public")))
    if not allowed:
        raise BadConfig(
            f"{root / 'clients'} holds no *.public key, so nobody could connect: "
            "make keys with `diptych keys DIR`, or correct `security.keys`"
        )
    return CurveServer(secret=_read_key(root / "server.secret"), allowed=allowed)


def _load_client(root: Path) -> CurveClient:
    return CurveClient(
        public=_read_key(root / "clients" / "fleet.public"),
        secret=_read_key(root / "clients" / "fleet.secret"),
        server=_read_key(root / "server.public"),
    )


def _read_key(path: Path) -> bytes:
    try:
        key = path.read_bytes().strip()
        zmq.curve_public(key)
    except OSError as error:
        raise BadConfig(f"cannot read key {path}: {error.strerror}; see `security.keys`") from error
    except (ValueError, zmq.ZMQError) as error:
        raise BadConfig(f"{path} does not hold a 40-character CURVE key") from error
    return key
