"""The decode worker's thread that fetches KV over sockets, verifies it and puts it in place."""

import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

import msgspec
import zmq
from msgspec import Struct

from shared.device.device import SharedKv
from shared.errors import DiptychError, ErrorPayload
from shared.kv.codecs.frame import CodecName
from shared.kv.codecs.planner import CodecFigures
from shared.messages.bulk import Chunk, Fetch, FetchRefused, Probe, ProbeEcho, ToReader
from shared.transport.bulk.calibration import measure_figures
from shared.transport.bulk.fetches import Done, Failed, Fetches, FetchLimits, Send
from shared.transport.bulk.landing import Landing, OpenJob
from shared.transport.bulk.plan import plan_fetch
from shared.transport.bulk.rates import PairRates
from shared.transport.bulk.server import PROBE_BYTES, probe_pattern
from shared.transport.bulk.source_link import Context, Lane, Peer, SourceLink
from shared.transport.bulk.stage import InStage
from shared.transport.bulk.staging import keep_staging_memory
from shared.transport.bulk.stumbles import Stumbles

log = logging.getLogger(__name__)

Source = TypeVar("Source", bound=Hashable)
_BUDGET = 16
_TICK = 0.02
_RETRY = 0.005
_NOBLOCK = int(zmq.NOBLOCK)


class FetchJob(Struct, Generic[Source], frozen=True, kw_only=True):
    """Bring blocks of layers [``first_layer``, ``end_layer``) from ``source``.

    A codec brings the first ``tokens`` tokens of them only; 0: all.
    """

    job: int
    source: Source
    first_layer: int
    end_layer: int
    source_blocks: tuple[int, ...]
    generations: tuple[int, ...]
    target_blocks: tuple[int, ...]
    tokens: int = 0


class Fetched(Struct, frozen=True):
    """The job is done and verified; ``again`` and ``spoiled`` as in ``Done``.

    ``bytes`` is what the blocks hold, ``wire`` what came over the link, encoded by ``codec``.
    """

    job: int
    bytes: int
    seconds: float
    again: int
    wire: int = 0
    codec: CodecName = "none"
    spoiled: int = 0


class Opened(Struct, Generic[Source], frozen=True):
    """The self-test of a source passed (``error`` None) or failed."""

    source: Source
    error: ErrorPayload | None


Outcome = Fetched | Failed | Opened[Source]


class ReaderLimits(Struct, frozen=True, kw_only=True):
    """``chunk_bytes`` per chunk, ``probe`` seconds for the self-test, the rest as named there."""

    chunk_bytes: int = 512 << 10
    probe: float = 5.0
    fetch: FetchLimits = FetchLimits()


class HostReader(Generic[Source]):
    """Commands may come from any thread; ``tell`` is called in this object's thread.

    Every ``fetch`` is answered once, and its target blocks are not touched afterwards. ``stage``
    is for a pool whose bytes are not in this machine's memory, and becomes this object's.
    """

    def __init__(
        self,
        context: Context,
        target: SharedKv,
        limits: ReaderLimits,
        tell: Callable[[Outcome[Source]], None],
        stage: InStage | None = None,
    ) -> None:
        keep_staging_memory()
        self.rejected = 0
        self._context = context
        self._target = target
        self._limits = limits
        self._tell = tell
        self._machine: Fetches[Source] = Fetches(limits.fetch)
        self._links: dict[Source, SourceLink] = {}
        self._open: dict[int, OpenJob] = {}
        self._landing = Landing(target, stage)
        self._figures: tuple[CodecFigures, ...] | None = None
        self._decoder: msgspec.msgpack.Decoder[ToReader] = msgspec.msgpack.Decoder(ToReader)
        self._encoder = msgspec.msgpack.Encoder()
        self._orders: queue.SimpleQueue[Callable[[float], None]] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._poller = zmq.Poller()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kv-reader", daemon=True)
        self._thread.start()

    @property
    def spoiled(self) -> int:
        """Chunks that did not verify."""
        return self._machine.spoiled

    @property
    def late(self) -> int:
        """Chunks that came late, twice or for nobody."""
        return self._machine.late

    def open(self, source: Source, peer: Peer) -> None:
        """Connect to a source and test it; answered by ``Opened``."""
        self._order(lambda now: self._connect(source, peer, now))

    def fetch(self, job: FetchJob[Source]) -> None:
        """Fetch, verify, put in place; answered by ``Fetched`` or ``Failed``."""
        self._order(lambda now: self._begin(job, now))

    def drop(self, source: Source) -> None:
        """Disconnect; jobs that are open fail."""
        self._order(lambda now: self._drop(source, "its link was closed", now))

    def close(self) -> None:
        """End the thread and close every socket; open jobs are not answered. Idempotent."""
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        for link in self._links.values():
            link.close()
        self._links.clear()
        self._landing.close()
        os.close(self._wake)

    def _order(self, order: Callable[[float], None]) -> None:
        if not self._closing:
            self._orders.put(order)
            os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        self._poller.register(self._wake, zmq.POLLIN)
        stumbles = Stumbles()
        while not self._closing:
            try:
                self._turn()
                stumbles.none()
            except Exception:
                log.exception("fetching KV failed")
                stumbles.another()

    def _turn(self) -> None:
        ready = dict(self._poller.poll(self._pause()))
        now = time.monotonic()
        if self._wake in ready:
            os.eventfd_read(self._wake)
        while not self._orders.empty():
            self._orders.get()(now)
        for source, link in list(self._links.items()):
            for lane in link.lanes:
                if self._links.get(source) is link:
                    self._receive(source, link, lane, now)
        for source, link in list(self._links.items()):
            if not link.tested and now >= link.deadline:
                seconds = self._limits.probe
                why = f"{link.peer.endpoint} did not answer the self-test in {seconds:g} s"
                self._fail_link(source, why, now)
        self._machine.tick(now)
        self._carry_out()
        for link in self._links.values():
            link.flush()

    def _pause(self) -> int | None:
        if any(link.waiting for link in self._links.values()):
            return int(1000 * _RETRY)
        if self._machine or not all(link.tested for link in self._links.values()):
            return int(1000 * _TICK)
        return None

    def _connect(self, source: Source, peer: Peer, now: float) -> None:
        nonces = [secrets.randbits(53) for _ in range(self._limits.fetch.sockets)]
        if peer.codec == "auto" and self._figures is None:
            self._figures = measure_figures(peer.layout or self._target.layout)
        rates = PairRates(self._figures or ())
        deadline = time.monotonic() + self._limits.probe
        try:
            link = SourceLink(
                self._context, self._poller, peer, rates, nonces=nonces, deadline=deadline
            )
        except DiptychError as error:
            self._tell(Opened(source, error.payload()))
            return
        self._links[source] = link
        for lane in link.lanes:
            probe = Probe(nonce=lane.nonce, arena=peer.arena, size=PROBE_BYTES)
            lane.outbox.append(self._encoder.encode(probe))

    def _begin(self, job: FetchJob[Source], now: float) -> None:
        link = self._links.get(job.source)
        if link is None:
            self._tell(Failed(job.job, _error("its source is not connected")))
            return
        blocks, targets = job.source_blocks, job.target_blocks
        if not len(blocks) == len(job.generations) == len(targets):
            self._tell(Failed(job.job, _error("the lists of blocks differ in length")))
            return
        layout = link.peer.layout or self._target.layout
        size = len(blocks) * sum(
            layout.layer_block_bytes(layer) for layer in range(job.first_layer, job.end_layer)
        )
        rule = link.peer.codec
        codec = link.rates.choose(size) if rule == "auto" else rule
        tokens = job.tokens or len(blocks) * layout.block_size
        fetch = Fetch(
            job=job.job,
            attempt=0,
            arena=link.peer.arena,
            first_layer=job.first_layer,
            end_layer=job.end_layer,
            blocks=blocks,
            generations=job.generations,
            chunk_bytes=self._limits.chunk_bytes,
            need=(),
            credit=0,
            codec=codec,
            tokens=tokens,
        )
        plan = plan_fetch(layout, fetch)
        link.rates.begun(codec, now)
        self._open[job.job] = OpenJob(layout, targets, plan, size, codec, tokens, link.rates)
        self._machine.begin(job.source, fetch, len(plan), now)

    def _drop(self, source: Source, why: str, now: float) -> None:
        link = self._links.pop(source, None)
        if link is not None:
            link.close()
        self._machine.lost(source, _error(why), now)

    def _fail_link(self, source: Source, why: str, now: float) -> None:
        self._drop(source, why, now)
        self._tell(Opened(source, _error(why)))

    def _receive(self, source: Source, link: SourceLink, lane: Lane, now: float) -> None:
        for _ in range(_BUDGET):
            try:
                frames = _next_message(lane.socket)
            except zmq.Again:
                return
            try:
                message = self._decoder.decode(frames[0].buffer)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                self.rejected += 1
                continue
            payload = [frame.buffer for frame in frames[1:]]
            match message:
                case Chunk():
                    self._chunk(source, message, payload, now)
                case FetchRefused():
                    self._machine.refused(source, message, now)
                case ProbeEcho():
                    self._echo(source, link, lane, message, payload)
            if source not in self._links:
                return
            self._carry_out()
            link.flush()

    def _chunk(
        self, source: Source, header: Chunk, payload: Sequence[memoryview], now: float
    ) -> None:
        job, attempt, index = header.job, header.attempt, header.index
        if not self._machine.wants(source, job, index):
            self._machine.arrived(source, job, attempt, now)
            return
        why = self._landing.put(self._open[self._machine.job_of(job)], header, payload)
        if why is None:
            self._machine.landed(job, attempt, index, now)
        else:
            self._machine.bad(job, attempt, index, why, now)

    def _echo(
        self,
        source: Source,
        link: SourceLink,
        lane: Lane,
        echo: ProbeEcho,
        payload: Sequence[memoryview],
    ) -> None:
        if lane.tested or echo.nonce != lane.nonce:
            return
        expected = probe_pattern(lane.nonce, PROBE_BYTES).tobytes()
        if echo.arena != link.peer.arena:
            why = f"{link.peer.endpoint} has another KV pool than announced (restarted?)"
            self._fail_link(source, why, time.monotonic())
        elif b"".join(payload) != expected:
            why = f"{link.peer.endpoint} garbled the self-test"
            self._fail_link(source, why, time.monotonic())
        else:
            lane.tested = True
            if link.tested:
                self._tell(Opened(source, None))

    def _carry_out(self) -> None:
        for effect in self._machine.take():
            match effect:
                case Done():
                    self._landing.settle()
                    done = self._close_job(effect.job)
                    self._tell(
                        Fetched(
                            effect.job,
                            done.size,
                            effect.seconds,
                            effect.again,
                            done.wire,
                            done.codec,
                            effect.spoiled,
                        )
                    )
                case Failed():
                    self._landing.settle()
                    self._close_job(effect.job)
                    self._tell(effect)
                case _:
                    self._send(effect)

    def _close_job(self, job: int) -> OpenJob:
        open_ = self._open.pop(job)
        open_.rates.over(time.monotonic())
        return open_

    def _send(self, effect: Send[Source]) -> None:
        link = self._links.get(effect.source)
        if link is not None:
            link.lanes[effect.lane].outbox.append(self._encoder.encode(effect.message))


def _next_message(socket: "zmq.Socket[bytes]") -> list[zmq.Frame]:
    """Return the frames of a message as libzmq holds them. Raises ``zmq.Again``."""
    # Not recv_multipart: it asks the socket for an option after each frame.
    frames = [socket.recv(_NOBLOCK, copy=False)]
    while frames[-1].more:
        frames.append(socket.recv(_NOBLOCK, copy=False))
    return frames


def _error(why: str) -> ErrorPayload:
    return ErrorPayload(
        code="transfer_failed", message=f"the KV did not arrive: {why}", retryable=True
    )
