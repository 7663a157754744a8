"""The last step of a chunk: verified, decoded where it was encoded, and put in place."""

import time
from collections.abc import Sequence

from msgspec import Struct

from shared.errors import DiptychError
from shared.kv.arena import KvArena
from shared.kv.codecs.frame import CodecName
from shared.messages.bulk import Chunk
from shared.transport.bulk.encoded import EncodedChunks
from shared.transport.bulk.payload import checksum, land
from shared.transport.bulk.plan import PlannedChunk
from shared.transport.bulk.rates import PairRates


class OpenJob(Struct):
    """A job under way. ``size``: bytes that its blocks hold; ``wire``: those that came."""

    blocks: tuple[int, ...]
    plan: tuple[PlannedChunk, ...]
    size: int
    codec: CodecName
    tokens: int
    rates: PairRates
    wire: int = 0


class Landing:
    """Puts chunks into one pool."""

    def __init__(self, target: KvArena) -> None:
        self._target = target
        self._encoded = EncodedChunks(target)

    def put(self, job: OpenJob, header: Chunk, payload: Sequence[memoryview]) -> str | None:
        """Verify a chunk of this job and put it in place, or say what is wrong with it.

        Nothing is written unless size and checksum are right and all of it could be decoded.
        """
        planned = job.plan[header.index]
        size = sum(len(frame) for frame in payload)
        plain = job.codec == "none"
        if plain and (size != planned.size or header.size != planned.size):
            return f"came with {size} of {planned.size} bytes"
        if size != header.size or not self._encoded.fits(planned, size):
            return f"came with {size} of {header.size} bytes, encoded from {planned.size}"
        if checksum(payload) != header.checksum:
            return "came with a wrong checksum"
        job.wire += size
        job.rates.arrived(size)
        if plain:
            land(self._target, planned, job.blocks, payload)
            return None
        begun = time.monotonic()
        try:
            self._encoded.decode(job.codec, planned, job.blocks, job.tokens, payload)
        except DiptychError as error:
            return f"cannot be decoded ({error.message})"
        spent = time.monotonic() - begun
        job.rates.coded(job.codec, planned.size, size, header.spent, spent)
        return None
