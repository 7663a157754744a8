"""The paths of ``diptych bench transfer``: each moves what becomes readable, when it does."""

import queue
import time
from typing import Protocol

import zmq

from shared.device.device import SharedKv
from shared.errors import TransferFailed
from shared.kv.arena import KvArena
from shared.kv.codecs.frame import CodecName
from shared.kv.copy import copy_blocks, verify_generations
from shared.transport.bulk.fetches import Failed, FetchLimits
from shared.transport.bulk.reader import Fetched, FetchJob, HostReader, Outcome, ReaderLimits
from shared.transport.bulk.source_link import Peer
from shared.transport.bulk.stage import InStage
from tools.bench.transfer_plan import Span, TransferPlan
from tools.bench.transfer_source import SourceReady

Context = zmq.Context[zmq.Socket[bytes]]
DEADLINE = 60.0


class Mover(Protocol):
    """One path."""

    def move(self, spans: list[Span], begun: float) -> int:
        """Move every span at its time; return the bytes on the wire once all have arrived.

        Raises:
            TransferFailed: something did not arrive.
        """
        ...


class IpcMover:
    """Copies blocks out of the other process's pool."""

    def __init__(self, source: KvArena, target: KvArena) -> None:
        self._source, self._target = source, target

    def move(self, spans: list[Span], begun: float) -> int:
        """Copy each span and check its generations."""
        size = 0
        for span in spans:
            sleep_until(begun + span.at)
            blocks = range(span.first_block, span.end_block)
            layers = range(span.first_layer, span.end_layer)
            told = [int(self._source.generations[b]) for b in blocks]
            copy_blocks(self._source, self._target, layers, blocks, blocks)
            if verify_generations(self._source, blocks, told):
                raise TransferFailed("blocks changed while they were copied")
            size += len(blocks) * sum(map(self._source.layout.layer_block_bytes, layers))
        return size


class HostMover:
    """Fetches over sockets with one codec; ``stage`` as for ``HostReader``."""

    def __init__(
        self,
        context: Context,
        plan: TransferPlan,
        ready: SourceReady,
        target: SharedKv,
        codec: CodecName,
        stage: InStage | None = None,
        *,
        sockets: int = 1,
    ) -> None:
        self._outcomes: queue.SimpleQueue[Outcome[str]] = queue.SimpleQueue()
        limits = ReaderLimits(
            chunk_bytes=plan.chunk_bytes,
            fetch=FetchLimits(slots=plan.slots, stall=10.0, sockets=sockets),
        )
        self._reader: HostReader[str] = HostReader(
            context, target, limits, self._outcomes.put, stage
        )
        identity = f"bench#{codec}{sockets}".encode()
        peer = Peer(
            endpoint=ready.endpoint, arena=ready.arena.arena_id, identity=identity, codec=codec
        )
        self._reader.open("bench", peer)
        self._next()
        self._job = 0

    def move(self, spans: list[Span], begun: float) -> int:
        """Ask for each span when it is readable, and wait for all."""
        for span in spans:
            sleep_until(begun + span.at)
            blocks = tuple(range(span.first_block, span.end_block))
            self._job += 1
            self._reader.fetch(
                FetchJob(
                    job=self._job,
                    source="bench",
                    first_layer=span.first_layer,
                    end_layer=span.end_layer,
                    source_blocks=blocks,
                    generations=(0,) * len(blocks),
                    target_blocks=blocks,
                )
            )
        wire = 0
        for _ in spans:
            outcome = self._next()
            if isinstance(outcome, Failed):
                raise TransferFailed(f"a fetch failed: {outcome.error.message}")
            assert isinstance(outcome, Fetched)
            wire += outcome.wire
        return wire

    def close(self) -> None:
        """Disconnect."""
        self._reader.close()

    def _next(self) -> Outcome[str]:
        try:
            return self._outcomes.get(timeout=DEADLINE)
        except queue.Empty:
            text = f"the sending process did not answer for {DEADLINE:g} s"
            raise TransferFailed(text) from None


def sleep_until(moment: float) -> None:
    """Sleep until the monotonic clock shows ``moment``."""
    pause = moment - time.monotonic()
    if pause > 0:
        time.sleep(pause)
