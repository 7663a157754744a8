"""The I/O thread of a client: it alone touches the socket, for the socket's whole life."""

import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from diptych.endpoint import Curve, check_endpoint, default_endpoint
from diptych.errors import InvalidRequest
from diptych.events import (
    Abort,
    Ask,
    Dial,
    Effect,
    Emit,
    Event,
    Fleet,
    HangUp,
    Leave,
    LinkDown,
    LinkTrouble,
    LinkUp,
    Open,
    Oversized,
    Ready,
    Received,
    Send,
    Tick,
    Update,
)
from diptych.open_request import Failed, Finished
from diptych.state import ClientLimits, ClientState
from diptych.wire import MAX_FRAME, FromClient, Submit, ToClient, WireError, routing_id

Sink = Callable[[Update], None]
"""Called in the I/O thread with each update of a call; must not block or raise."""

_LONGEST_POLL = 10.0
_FRAMES_PER_WAKE = 1000
_HIGH_WATER = 10_000
_OUTBOX = 20_000
_FAREWELL_MS = 200
_CLOSE_TIMEOUT = 5.0
_TROUBLES = {
    int(zmq.EVENT_CONNECT_RETRIED): "nobody listens there",
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "the handshake failed",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "the handshake failed: wrong keys or protocol",
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): "the gateway refused the client's key",
}
_WATCHED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED) | int(zmq.EVENT_DISCONNECTED) | sum(_TROUBLES)


class Channel:
    """Runs one ``ClientState`` on a thread of its own; all methods are thread-safe.

    The thread refers to the channel but never to a client, so that a forgotten client can be
    collected and close its channel.
    """

    def __init__(
        self, endpoint: str, api_key: str | None, curve: Curve | None, limits: ClientLimits
    ) -> None:
        self.rejected = 0
        self._incarnation = 1 + int.from_bytes(os.urandom(7), "little") % (2**53 - 1)
        self._state = ClientState(self._incarnation, endpoint, api_key, limits)
        self._endpoint = endpoint
        self._curve = curve
        self._keys = count(1)
        self._lock = threading.RLock()  # a finalizer may abort a call amid `_command`
        self._closed = False
        self._last_word = Failed(WireError(code="cancelled", message="this client is closed"))
        self._commands: deque[tuple[Event, Sink | None]] = deque()
        self._sinks: dict[int, Sink] = {}
        self._outbox: deque[bytes] = deque()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToClient)
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._waker, self._wakened = socket.socketpair()
        self._waker.setblocking(False)
        self._wakened.setblocking(False)
        self._context = zmq.Context()
        self._thread = threading.Thread(target=self._run, name="diptych-client", daemon=True)
        self._thread.start()

    @classmethod
    def open(
        cls, endpoint: str | None, api_key: str | None, curve: Curve | None, limits: ClientLimits
    ) -> "Channel":
        """Check the arguments and start. Raises ``InvalidRequest``."""
        where = default_endpoint() if endpoint is None else endpoint
        check_endpoint(where, curve)
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise InvalidRequest("api_key must be printable ASCII", param="api_key")
        return cls(where, api_key, curve, limits)

    @contextmanager
    def call(self) -> Iterator[int]:
        """Give a key for one call; what is raised inside, also by a signal, cancels the call."""
        key = next(self._keys)
        try:
            yield key
        except BaseException:
            self.abort(key)
            raise

    def start(self, event: Open | Ask, sink: Sink) -> None:
        """Start a call under a key of ``call``; ``deadline`` is on ``time.monotonic``."""
        self._command(event, sink)

    def abort(self, key: int) -> None:
        """Cancel a call; one that ended, or never started, is left alone."""
        self._command(Abort(key), None)

    def close(self) -> None:
        """Cancel all calls, take leave and end the thread; waits for it, unless called by it."""
        self._command(Leave(), None)
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_TIMEOUT)

    def _command(self, event: Event, sink: Sink | None) -> None:
        with self._lock:
            closed = self._closed
            if not closed:
                self._commands.append((event, sink))
                self._wake()
        if closed and sink is not None:
            sink(self._last_word)

    def _wake(self) -> None:
        try:
            self._waker.send(b"\0")
        except BlockingIOError:
            return

    def _run(self) -> None:
        try:
            self._apply(Tick())
            while self._state.phase != "left":
                self._wait()
                self._take_commands()
                self._take_frames()
                self._take_link_events()
                self._apply(Tick())
                self._flush()
        except BaseException:
            message = "the client's I/O thread died; see its traceback on stderr"
            self._last_word = Failed(WireError(code="internal", message=message))
            raise
        finally:
            self._shut()

    def _wait(self) -> None:
        seconds = min(self._state.wake_at() - time.monotonic(), _LONGEST_POLL)
        poller = zmq.Poller()
        poller.register(self._wakened, zmq.POLLIN)
        if self._socket is not None and self._monitor is not None:
            poller.register(self._socket, zmq.POLLIN | (zmq.POLLOUT if self._outbox else 0))
            poller.register(self._monitor, zmq.POLLIN)
        poller.poll(max(0, math.ceil(seconds * 1000)))

    def _take_commands(self) -> None:
        try:
            while self._wakened.recv(4096):
                pass
        except BlockingIOError:
            pass
        while self._commands:
            event, sink = self._commands.popleft()
            match event:
                case Open() | Ask() if sink is not None:
                    self._sinks[event.key] = sink
                case Abort():
                    self._sinks.pop(event.key, None)
            self._apply(event)

    def _take_frames(self) -> None:
        session = self._state.session
        for _ in range(_FRAMES_PER_WAKE):
            if self._socket is None or self._state.session != session:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                if len(frames) != 1:
                    raise msgspec.DecodeError("a message has one frame")
                message = self._decoder.decode(frames[0])
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                self.rejected += 1
                self._apply(LinkDown(session, "the gateway sent a malformed message"))
            else:
                self._apply(Received(session, message))

    def _take_link_events(self) -> None:
        session = self._state.session
        while self._monitor is not None and self._state.session == session:
            try:
                event = int(recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"])
            except zmq.Again:
                return
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._apply(LinkUp(session))
            elif event == zmq.EVENT_DISCONNECTED:
                self._apply(LinkDown(session, "the connection broke"))
            else:
                self._apply(LinkTrouble(session, _TROUBLES[event]))

    def _apply(self, event: Event) -> None:
        now = time.monotonic()
        events = deque([event])
        while events:
            for effect in self._state.handle(events.popleft(), now):
                follow_up = self._perform(effect)
                if follow_up is not None:
                    events.append(follow_up)

    def _perform(self, effect: Effect) -> Event | None:
        match effect:
            case Emit():
                self._emit(effect.key, effect.update)
            case Send():
                return self._enqueue(effect.message)
            case HangUp():
                self._hang_up(linger=0)
            case Dial():
                self._hang_up(linger=0)
                return self._dial(effect.session)
        return None

    def _emit(self, key: int, update: Update) -> None:
        last = isinstance(update, Finished | Failed | Ready | Fleet)
        sink = self._sinks.pop(key, None) if last else self._sinks.get(key)
        if sink is not None:
            sink(update)

    def _enqueue(self, message: FromClient) -> Event | None:
        frame = self._encoder.encode(message)
        if isinstance(message, Submit) and len(frame) > MAX_FRAME:
            return Oversized(message.id, len(frame))
        self._outbox.append(frame)
        if len(self._outbox) > _OUTBOX:
            return LinkDown(self._state.session, "the gateway takes no messages")
        return None

    def _flush(self) -> None:
        try:
            while self._outbox and self._socket is not None:
                self._socket.send(self._outbox[0], zmq.NOBLOCK)
                self._outbox.popleft()
        except zmq.Again:
            return

    def _dial(self, session: int) -> Event | None:
        link = self._context.socket(zmq.DEALER)
        self._socket = link
        link.setsockopt(zmq.ROUTING_ID, routing_id(self._incarnation, session))
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.IMMEDIATE, 1),
            (zmq.SNDHWM, _HIGH_WATER),
            (zmq.RCVHWM, _HIGH_WATER),
            (zmq.MAXMSGSIZE, MAX_FRAME),
            (zmq.CONNECT_TIMEOUT, 3000),
            (zmq.HANDSHAKE_IVL, 3000),
            (zmq.RECONNECT_IVL, 100),
            (zmq.RECONNECT_IVL_MAX, 1000),
            (zmq.TCP_KEEPALIVE, 1),
            (zmq.IPV6, 1),
        ):
            link.setsockopt(option, value)
        if self._curve is not None:
            link.curve_serverkey = self._curve.server
            link.curve_publickey = self._curve.public
            link.curve_secretkey = self._curve.secret
        self._monitor = link.get_monitor_socket(_WATCHED)
        self._monitor.linger = 0
        try:
            link.connect(self._endpoint)
        except zmq.ZMQError as error:
            return LinkDown(session, str(error))
        return None

    def _hang_up(self, linger: int) -> None:
        self._outbox.clear()
        if self._socket is not None and self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close()
            self._socket.close(linger)
        self._socket = self._monitor = None

    def _shut(self) -> None:
        with self._lock:
            self._closed = True
            commands, self._commands = list(self._commands), deque()
        self._flush()
        self._hang_up(linger=_FAREWELL_MS)
        self._context.term()
        self._waker.close()
        self._wakened.close()
        waiting = [*self._sinks.values(), *(sink for _, sink in commands if sink is not None)]
        self._sinks.clear()
        for sink in waiting:
            sink(self._last_word)
