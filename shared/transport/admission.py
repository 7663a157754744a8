"""Decides which CURVE keys may connect: the ZAP handler (rfc.zeromq.org/spec/27) on the loop.

libzmq asks one handler per context over inproc and refuses everybody while none answers.
"""

import logging
import weakref
from typing import Final

import zmq
from zmq.utils import z85

from shared.transport.pump import SocketPump
from shared.transport.security import CurveServer

log = logging.getLogger(__name__)

_NAMED: Final = 64
"""Refused keys that one socket names in the log; a stranger may make as many as it likes."""

_ADDRESS = "inproc://zeromq.zap.01"
_VERSION = b"1.0"

Context = zmq.Context[zmq.Socket[bytes]]


class Admission:
    """The keys of one binding socket. ``denied`` counts connections refused for their key.

    Each refused key is named in the log once: a peer refused keeps trying and its own side cannot
    tell why nobody answers. Must be closed; the last one of a context takes the handler with it.
    """

    def __init__(self, context: Context, security: CurveServer) -> None:
        self.denied = 0
        self.domain = b"link-%d" % id(self)
        self._secret = security.secret
        self._allowed = frozenset(z85.decode(key) for key in security.allowed)
        self._named: set[bytes] = set()
        self._context = context
        gate = _gates.get(context)
        if gate is None:
            gate = _gates[context] = _Gate(context)
        self._gate: _Gate | None = gate
        gate.admissions[self.domain] = self

    def apply(self, socket: "zmq.Socket[bytes]") -> None:
        """Make ``socket``, not bound yet, a CURVE server that asks this admission."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, self.domain)

    def judge(self, key: bytes) -> bool:
        """Whether the raw 32-byte public key may connect."""
        if key in self._allowed:
            return True
        self.denied += 1
        if key not in self._named and len(self._named) < _NAMED:
            self._named.add(key)
            log.warning(
                "refused a connection: its key %s is none of clients/*.public in `security.keys`",
                z85.encode(key).decode(),
            )
        return False

    def close(self) -> None:
        """Refuse everybody from now on. Idempotent."""
        gate, self._gate = self._gate, None
        if gate is None:
            return
        del gate.admissions[self.domain]
        if not gate.admissions:
            del _gates[self._context]
            gate.close()


class _Gate:
    def __init__(self, context: Context) -> None:
        self.admissions: dict[bytes, Admission] = {}
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ADDRESS)
        self._pump = SocketPump(self._socket, self._answer, lambda: True)

    def close(self) -> None:
        self._pump.close()
        self._socket.close()

    def _answer(self, frames: list[bytes]) -> None:
        # version, request id, domain, address, routing id, mechanism, credentials...
        request = frames[1] if len(frames) > 1 else b""
        admitted = False
        if len(frames) == 7 and frames[0] == _VERSION and frames[5] == b"CURVE":
            admission = self.admissions.get(frames[2])
            admitted = admission is not None and admission.judge(frames[6])
        # 300 cuts the connection and lets the peer try again after its handshake timeout; on
        # 400 libzmq gives up for good, and a key allowed later would need both sides restarted.
        status, text = (b"200", b"OK") if admitted else (b"300", b"unknown key")
        self._socket.send_multipart((_VERSION, request, status, text, b"", b""), zmq.NOBLOCK)


_gates: "weakref.WeakKeyDictionary[Context, _Gate]" = weakref.WeakKeyDictionary()
