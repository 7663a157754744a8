"""Typed control links: one message per frame, msgpack, over plain zmq sockets on the loop.

A link belongs to the loop and thread it was made on. Bad input is counted, never raised.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

import msgspec
import zmq
from msgspec import Struct

from shared.transport.admission import Admission
from shared.transport.endpoint import Listener, bind, connect
from shared.transport.hopeless import WriteWatch
from shared.transport.pump import LinkLimits, Outbox, SocketPump
from shared.transport.security import CurveClient, CurveServer

__all__ = ["DealerLink", "LinkLimits", "Receive", "RouterLink"]

log = logging.getLogger(__name__)

In = TypeVar("In")
Out = TypeVar("Out")

_DEFAULT = LinkLimits()
_NOBLOCK, _SNDMORE = int(zmq.NOBLOCK), int(zmq.SNDMORE)
"""As plain numbers: arithmetic with pyzmq's enums costs more than the calls."""


class Receive(Struct, frozen=True):
    """What a link decodes, if that is more than one type or union.

    ``head`` is the type that a frame becomes which is none of ``messages``, but begins like one:
    what a later version says must not look like garbage.
    """

    messages: object
    head: object


class RouterLink(Generic[In, Out]):
    """The binding end: one ROUTER socket, many peers known by their routing id.

    ``receive`` is the message type or union to decode, or both of a ``Receive``;
    ``on_message(peer, message)`` must not block. What it raises goes to the loop's exception
    handler. Messages without a routing id of the peer's own choice are rejected.

    Raises:
        ResourceMissing: address in use or not available, or an ipc path that is too long.
        BadConfig: an endpoint that makes no sense.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        endpoint: str,
        receive: object,
        on_message: Callable[[bytes, In], None],
        *,
        limits: LinkLimits = _DEFAULT,
        security: CurveServer | None = None,
    ) -> None:
        self.rejected = 0
        self._limits = limits
        self._codec: _Codec[In, Out] = _Codec(receive, limits.max_frame)
        self._on_message = on_message
        self._outboxes: dict[bytes, Outbox] = {}
        self._admission = None if security is None else Admission(context, security)
        try:
            self._listener: Listener = bind(context, endpoint, limits, self._admission)
        except BaseException:
            if self._admission is not None:
                self._admission.close()
            raise
        self._socket = self._listener.socket
        self.endpoint = self._listener.endpoint
        self._pump = SocketPump(self._socket, self._on_frames, self._flush)

    @property
    def denied(self) -> int:
        """Connections refused because of their key."""
        return 0 if self._admission is None else self._admission.denied

    def send(self, peer: bytes, message: Out) -> bool:
        """Send, or queue while the peer is slow.

        Returns:
            False when the peer is gone, its outbox is full, the message is larger than
            ``max_frame``, or the link is closed. True is no proof of arrival.
        """
        payload = self._codec.encode(message)
        if self._socket.closed or payload is None:
            return False
        waiting = self._outboxes.get(peer)
        if waiting is not None:
            return waiting.push(payload)
        try:
            if self._write(peer, payload):
                return True
        except _PeerGone:
            return False
        finally:
            self._pump.touch()
        waiting = self._outboxes[peer] = Outbox(self._limits)
        self._pump.retry_soon()
        return waiting.push(payload)

    def close(self) -> None:
        """Offer what waits once more, then close socket and ipc file. Idempotent."""
        if self._socket.closed:
            return
        self._flush()
        self._pump.close()
        self._listener.close()
        if self._admission is not None:
            self._admission.close()

    def _on_frames(self, frames: list[bytes]) -> None:
        # Every peer names itself. A name from libzmq starts with 0: nobody's, or that of a
        # connection whose owner came back on another one before it was read to its end.
        nameless = frames[0][:1] == b"\0"
        message = None if nameless else self._codec.decode(frames[1:])
        if message is None:
            self.rejected += 1
            return
        self._on_message(frames[0], message)

    def _write(self, peer: bytes, payload: bytes) -> bool:
        try:
            self._socket.send(peer, _NOBLOCK | _SNDMORE)
            self._socket.send(payload, _NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise _PeerGone from None
            raise
        return True

    def _flush(self) -> bool:
        for peer, waiting in list(self._outboxes.items()):
            try:
                emptied = waiting.flush(partial(self._write, peer))
            except _PeerGone:
                emptied = True
            if emptied:
                del self._outboxes[peer]
        return not self._outboxes


class DealerLink(Generic[In, Out]):
    """The connecting end: one DEALER socket under an explicit routing id.

    Messages sent before the peer is there, or while it is away, wait in the bounded outbox. A
    socket that takes nothing for ``HOPELESS`` seconds is opened anew. Arguments and errors are
    those of ``RouterLink``.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        endpoint: str,
        identity: bytes,
        receive: object,
        on_message: Callable[[In], None],
        *,
        limits: LinkLimits = _DEFAULT,
        security: CurveClient | None = None,
    ) -> None:
        self.rejected = 0
        self.endpoint = endpoint
        self._codec: _Codec[In, Out] = _Codec(receive, limits.max_frame)
        self._on_message = on_message
        self._outbox = Outbox(limits)
        self._watch = WriteWatch()
        self._connect = partial(connect, context, endpoint, identity, limits, security)
        self._loop = asyncio.get_running_loop()
        self._socket = self._connect()
        self._pump = SocketPump(self._socket, self._on_frames, self._flush)

    def send(self, message: Out) -> bool:
        """Send, or queue while the peer is slow or away.

        Returns:
            False when the outbox is full, the message is larger than ``max_frame``, or the
            link is closed. True is no proof of arrival.
        """
        payload = self._codec.encode(message)
        if self._socket.closed or payload is None:
            return False
        if self._outbox:
            return self._outbox.push(payload)
        sent = self._write(payload)
        self._pump.touch()
        if sent:
            return True
        self._pump.retry_soon()
        return self._outbox.push(payload)

    def fits(self, message: Out) -> bool:
        """Whether the message is small enough to be sent at all."""
        return self._codec.encode(message) is not None

    def close(self) -> None:
        """Offer what waits once more, then close the socket. Idempotent."""
        if self._socket.closed:
            return
        self._flush()
        self._pump.close()
        self._socket.close()

    def _on_frames(self, frames: list[bytes]) -> None:
        message = self._codec.decode(frames)
        if message is None:
            self.rejected += 1
            return
        self._on_message(message)

    def _write(self, payload: bytes) -> bool:
        try:
            self._socket.send(payload, _NOBLOCK)
        except zmq.Again:
            if self._watch.hopeless(self._loop.time()):
                self._loop.call_soon(self._reopen)  # not now: the pump is in the midst of a write
            return False
        self._watch.wrote()
        return True

    def _flush(self) -> bool:
        return self._outbox.flush(self._write)

    def _reopen(self) -> None:
        if self._socket.closed:
            return
        log.warning("nothing could be sent to %s for a while; connecting anew", self.endpoint)
        former, self._socket = self._socket, self._connect()
        self._pump.close()
        former.close(linger=0)
        self._pump = SocketPump(self._socket, self._on_frames, self._flush)
        self._pump.retry_soon()


class _PeerGone(Exception):
    """No connection has this routing id."""


class _Codec(Generic[In, Out]):
    def __init__(self, receive: object, max_frame: int) -> None:
        self._max_frame = max_frame
        types = [receive]
        if isinstance(receive, Receive):
            types = [receive.messages, receive.head]
        self._decoders: list[msgspec.msgpack.Decoder[In]] = [
            msgspec.msgpack.Decoder(one) for one in types
        ]
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, message: Out) -> bytes | None:
        payload = self._encoder.encode(message)
        return payload if len(payload) <= self._max_frame else None

    def decode(self, frames: list[bytes]) -> In | None:
        if len(frames) != 1 or len(frames[0]) > self._max_frame:
            return None
        for decoder in self._decoders:
            try:
                return decoder.decode(frames[0])
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                continue
        return None
