"""The prefill worker's thread that sends KV chunks straight out of the pool."""

import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
import zmq
from msgspec import Struct

from shared.device.device import SharedKv
from shared.fault_rules import FaultsSection
from shared.kv.codecs.registry import CODEC_NAMES
from shared.messages.bulk import (
    CancelFetch,
    Chunk,
    Credit,
    Fetch,
    FetchRefused,
    FromReader,
    Probe,
    ProbeEcho,
    ToReader,
)
from shared.transport.admission import Admission
from shared.transport.bulk.encoded import EncodedChunks, known_codec
from shared.transport.bulk.faults import FaultyLink, Parcel
from shared.transport.bulk.payload import checksum
from shared.transport.bulk.servings import Next, Servings
from shared.transport.bulk.stage import ArenaStage, Lift, OutStage, in_memory
from shared.transport.bulk.stumbles import Stumbles
from shared.transport.endpoint import bind
from shared.transport.pump import LinkLimits
from shared.transport.security import CurveServer

log = logging.getLogger(__name__)

PROBE_BYTES: Final = 64 << 10
_LIMITS = LinkLimits(max_frame=4 << 20, hwm=1024)
_BUDGET = 64
_BURST = 8
_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
"""As plain numbers: arithmetic with pyzmq's enums costs more than the calls."""
_TICK = 1.0
_FULL = 1
"""Milliseconds until it is looked again for a free slab."""


class ServerStats(Struct):
    """Counts since start; written by the thread, read anywhere."""

    chunks: int = 0
    bytes: int = 0
    refused: int = 0
    rejected: int = 0


class _Begun(Struct, frozen=True):
    """The chunk to send next, and where its bytes come from; None for one that is encoded."""

    item: Next
    lift: Lift | None

    def like(self, other: "_Begun") -> bool:
        """Return whether both are of the same fetch."""
        return (self.item.peer, self.item.fetch) == (other.item.peer, other.item.fetch)

    def drop(self) -> None:
        """It is not sent."""
        if self.lift is not None:
            self.lift.drop()


class HostServer:
    """Binds in the loop's thread, so that a wrong endpoint is an error at start.

    ``stage`` is for a pool whose bytes are not in this machine's memory, and becomes this object's.

    Raises:
        ResourceMissing: the endpoint is in use or not available.
        BadConfig: an endpoint that makes no sense.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        endpoint: str,
        arena: SharedKv,
        *,
        worker: str,
        security: CurveServer | None = None,
        faults: FaultsSection | None = None,
        stage: OutStage | None = None,
    ) -> None:
        self.stats = ServerStats()
        self._arena = arena
        self._arena_id = arena.descriptor().arena_id
        self._stage = stage or ArenaStage(in_memory(arena))
        # Codecs compute on the CPU: what is in a GPU's memory travels as it is.
        self._encoded = EncodedChunks(in_memory(arena)) if stage is None else None
        codecs = CODEC_NAMES if stage is None else ()
        self._jobs = Servings(arena.layout, arena.num_blocks, self._arena_id, codecs=codecs)
        self._faults = None if faults is None else FaultyLink(faults, worker)
        self._decoder: msgspec.msgpack.Decoder[FromReader] = msgspec.msgpack.Decoder(FromReader)
        self._encoder = msgspec.msgpack.Encoder()
        self._admission = None if security is None else Admission(context, security)
        try:
            self._listener = bind(context, endpoint, _LIMITS, self._admission)
        except BaseException:
            self._stage.close()
            if self._admission is not None:
                self._admission.close()
            raise
        self._socket = self._listener.socket
        self.endpoint = self._listener.endpoint
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kv-server", daemon=True)
        self._thread.start()

    @property
    def denied(self) -> int:
        """Connections refused because of their key."""
        return 0 if self._admission is None else self._admission.denied

    def close(self) -> None:
        """Stop sending, end the thread, close the socket. Idempotent."""
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)
        self._listener.close()
        self._stage.close()
        if self._admission is not None:
            self._admission.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        expired = time.monotonic()
        stumbles = Stumbles()
        while not self._closing:
            try:
                poller.poll(self._pause())
                now = time.monotonic()
                self._receive(now)
                self._send_some(now)
                if now - expired > _TICK:
                    expired = now
                    self._jobs.expire(now)
                stumbles.none()
            except Exception:
                log.exception("serving KV failed; the reader asks again")
                stumbles.another()

    def _pause(self) -> int:
        if self._jobs.sendable:
            return 0 if self._stage.room else _FULL
        wait = None if self._faults is None else self._faults.wait(time.monotonic())
        return int(1000 * _TICK if wait is None else min(1000 * wait + 1, 1000 * _TICK))

    def _receive(self, now: float) -> None:
        for _ in range(_BUDGET):
            try:
                frames = self._socket.recv_multipart(_NOBLOCK)
            except zmq.Again:
                return
            try:
                message = self._decoder.decode(frames[1]) if len(frames) == 2 else None
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                message = None
            if message is None:
                self.stats.rejected += 1
            else:
                self._take_in(frames[0], message, now)

    def _take_in(self, peer: bytes, message: FromReader, now: float) -> None:
        match message:
            case Probe():
                self._probe(peer, message)
            case Fetch():
                refusal = self._jobs.fetch(peer, message, now)
                if refusal is not None:
                    self.stats.refused += 1
                    self._write(peer, refusal)
            case Credit():
                self._jobs.credit(peer, message, now)
            case CancelFetch():
                self._jobs.cancel(peer, message)

    def _probe(self, peer: bytes, message: Probe) -> None:
        fits = message.arena == self._arena_id and 0 < message.size <= PROBE_BYTES
        payload = [probe_pattern(message.nonce, message.size)] if fits else []
        echo = ProbeEcho(
            nonce=message.nonce,
            arena=self._arena_id,
            size=message.size if fits else 0,
            checksum=checksum(payload),
        )
        self._write(peer, echo, payload)

    def _send_some(self, now: float) -> None:
        """Send what is due and a few chunks more, then look for messages again."""
        if self._faults is not None:
            for parcel in self._faults.due(now):
                self._write(parcel.peer, parcel.header, parcel.frames)
        begun, ahead = None, self._begin()
        try:
            for left in reversed(range(_BURST)):
                begun, ahead = ahead, None
                if begun is None:
                    return
                ahead = self._begin() if left else None
                if not self._serve(begun, now) and ahead is not None and ahead.like(begun):
                    ahead.drop()
                    ahead = self._begin()
        finally:
            for open_ in (begun, ahead):
                if open_ is not None:
                    open_.drop()

    def _begin(self) -> _Begun | None:
        """Begin to take a chunk out while the one before it is waited for, checked and sent."""
        item = self._jobs.next() if self._stage.room else None
        if item is None:
            return None
        if item.fetch.codec != "none" and known_codec(item.fetch.codec) is not None:
            return _Begun(item, None)
        return _Begun(item, self._stage.lift(item.chunk, item.fetch.blocks))

    def _serve(self, begun: _Begun, now: float) -> bool:
        """Send a chunk if its blocks still are those announced; return whether they are."""
        item, fetch = begun.item, begun.item.fetch
        frames, spent = self._take_out(begun)
        digest = checksum(frames)
        # After the checksum: bytes that fit it were the announced ones, and libzmq may read
        # the pool later than now, when the blocks are somebody else's.
        changed = self._arena.generations[item.blocks] != item.told
        reused = int(np.count_nonzero(changed))
        if reused:
            text = f"{reused} blocks were used anew before they were sent"
            self._jobs.drop(item.peer, fetch.job)
            self.stats.refused += 1
            refusal = FetchRefused(
                job=fetch.job,
                attempt=fetch.attempt,
                reason="generation",
                message=text,
                reused=reused,
            )
            self._write(item.peer, refusal)
            return False
        header = Chunk(
            job=fetch.job,
            attempt=fetch.attempt,
            index=item.index,
            size=sum(len(frame) for frame in frames),
            checksum=digest,
            spent=spent,
        )
        if self._faults is None:
            self._write(item.peer, header, frames)
            return True
        for parcel in self._faults.give(Parcel(item.peer, header, frames), now):
            self._write(parcel.peer, parcel.header, parcel.frames)
        return True

    def _take_out(self, begun: _Begun) -> tuple[list[memoryview], float]:
        """Return a chunk's frames, and the seconds that encoding them took."""
        if begun.lift is not None:
            return begun.lift.frames(), 0.0
        fetch, codec = begun.item.fetch, known_codec(begun.item.fetch.codec)
        assert self._encoded is not None and codec is not None
        start = time.monotonic()
        frames = self._encoded.encode(codec, begun.item.chunk, fetch.blocks, fetch.tokens)
        return frames, time.monotonic() - start

    def _write(self, peer: bytes, message: ToReader, payload: Sequence[memoryview] = ()) -> None:
        """Send or drop: a reader that misses something asks again."""
        frames: list[bytes | memoryview] = [self._encoder.encode(message), *payload]
        try:
            self._socket.send(peer, _MORE)
            for frame in frames[:-1]:
                self._socket.send(frame, _MORE, copy=len(frame) < 65536)
            self._socket.send(frames[-1], _NOBLOCK, copy=len(frames[-1]) < 65536)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                self._jobs.drop_peer(peer)
            elif error.errno != zmq.EAGAIN:
                raise
            return
        self.stats.chunks += bool(payload)
        self.stats.bytes += sum(len(frame) for frame in payload)


def probe_pattern(nonce: int, size: int) -> memoryview:
    """Return the bytes that answer a probe: never the same for two nonces."""
    numbers = np.arange(nonce % 2**32, nonce % 2**32 + -(-size // 8), dtype=np.uint64)
    mixed = numbers * np.uint64(0x9E3779B97F4A7C15)
    return mixed.view(np.uint8)[:size].data
