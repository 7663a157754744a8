"""Talk to the supervisor of a run: states, start, stop. Every call has a deadline."""

import http.client
import socket
import xmlrpc.client
from pathlib import Path

import msgspec
from msgspec import Struct

from shared.errors import ResourceMissing

_TIMEOUT = 20.0


class ProcessState(Struct, frozen=True, kw_only=True):
    """One process as the supervisor sees it; ``pid`` 0 means it does not run."""

    name: str
    group: str
    statename: str
    pid: int
    exitstatus: int
    start: int
    now: int


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class _UnixTransport(xmlrpc.client.Transport):
    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__()
        self._path = path
        self._timeout = timeout

    def make_connection(self, host: object) -> http.client.HTTPConnection:
        return _UnixConnection(self._path, self._timeout)


class Control:
    """XML-RPC to one supervisor; raises ``ResourceMissing`` when it does not answer."""

    def __init__(self, socket_path: Path, *, timeout: float = _TIMEOUT) -> None:
        self._path = socket_path
        self._timeout = timeout

    def states(self) -> dict[str, ProcessState]:
        """Return every process by name."""
        infos = msgspec.convert(self._call("supervisor.getAllProcessInfo"), list[ProcessState])
        return {info.name: info for info in infos}

    def start(self, process: ProcessState) -> None:
        """Ask for a start and return at once."""
        self._call("supervisor.startProcess", f"{process.group}:{process.name}", False)

    def stop(self, process: ProcessState) -> None:
        """Ask for a stop (SIGTERM, then SIGKILL after the drain time) and return at once."""
        self._call("supervisor.stopProcess", f"{process.group}:{process.name}", False)

    def _call(self, method: str, *arguments: str | bool) -> object:
        transport = _UnixTransport(self._path, self._timeout)
        payload = xmlrpc.client.dumps(arguments, method)
        try:
            (answer,) = transport.request("localhost", "/RPC2", payload.encode())
        except xmlrpc.client.Fault as fault:
            raise ResourceMissing(
                f"the supervisor refused {method}: {fault.faultString}"
            ) from fault
        except (OSError, http.client.HTTPException, xmlrpc.client.Error) as error:
            raise ResourceMissing(f"no supervisor answers at {self._path}: {error}") from error
        finally:
            transport.close()
        return answer
