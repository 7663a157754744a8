"""The last step of a chunk: verified, decoded where it was encoded, and put in place."""

import time
from collections.abc import Sequence

from msgspec import Struct

from shared.device.device import SharedKv
from shared.errors import DiptychError
from shared.kv.codecs.frame import CodecName
from shared.kv.layout import KvLayout
from shared.messages.bulk import Chunk
from shared.transport.bulk.convert import land_converted
from shared.transport.bulk.encoded import EncodedChunks
from shared.transport.bulk.payload import checksum
from shared.transport.bulk.plan import PlannedChunk
from shared.transport.bulk.rates import PairRates
from shared.transport.bulk.stage import ArenaStage, InStage, in_memory


class OpenJob(Struct):
    """A job under way. ``size``: bytes that its blocks hold; ``wire``: those that came.

    ``layout`` is the source's, which may differ from the own pool's in dtype.
    """

    layout: KvLayout
    blocks: tuple[int, ...]
    plan: tuple[PlannedChunk, ...]
    size: int
    codec: CodecName
    tokens: int
    rates: PairRates
    wire: int = 0


class Landing:
    """Puts chunks into one pool, through ``stage`` where its bytes are not in this memory."""

    def __init__(self, target: SharedKv, stage: InStage | None = None) -> None:
        self._target = target
        self._stage = stage or ArenaStage(in_memory(target))
        self._encoded = EncodedChunks(in_memory(target)) if stage is None else None

    def settle(self) -> None:
        """Return once nothing writes to the pool any more; before it no job may be answered."""
        self._stage.settle()

    def close(self) -> None:
        """Give back what landing needed, after its thread has ended."""
        self._stage.close()

    def put(self, job: OpenJob, header: Chunk, payload: Sequence[memoryview]) -> str | None:
        """Verify a chunk of this job and put it in place, or say what is wrong with it.

        Nothing is written unless size and checksum are right and all of it could be decoded.
        """
        planned = job.plan[header.index]
        size = sum(len(frame) for frame in payload)
        plain = job.codec == "none"
        if plain and (size != planned.size or header.size != planned.size):
            return f"came with {size} of {planned.size} bytes"
        if size != header.size or (self._encoded and not self._encoded.fits(planned, size)):
            return f"came with {size} of {header.size} bytes, encoded from {planned.size}"
        if checksum(payload) != header.checksum:
            return "came with a wrong checksum"
        job.wire += size
        job.rates.arrived(size)
        if plain:
            if job.layout == self._target.layout:
                self._stage.land(planned, job.blocks, payload)
            else:
                arena = in_memory(self._target)
                land_converted(arena, job.layout, planned, job.blocks, payload)
            return None
        assert self._encoded is not None
        begun = time.monotonic()
        try:
            self._encoded.decode(job.codec, planned, job.blocks, job.tokens, payload, job.layout)
        except DiptychError as error:
            return f"cannot be decoded ({error.message})"
        spent = time.monotonic() - begun
        job.rates.coded(job.codec, planned.size, size, header.spent, spent)
        return None
