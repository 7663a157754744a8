"""Reader (DEALER, connects) <-> prefill worker (ROUTER, binds): KV bytes on the ``host`` path.

Frame 0 is one of these messages. A ``Chunk`` and a ``ProbeEcho`` are followed by one or more
payload frames that together have ``size`` bytes; how they are cut means nothing.
"""

from typing import Literal

from msgspec import Struct


class Probe(Struct, tag="probe", frozen=True, kw_only=True):
    """Self-test: send a pattern of ``size`` bytes back, if the pool still is ``arena``."""

    nonce: int
    arena: int
    size: int


class Fetch(Struct, tag="fetch", frozen=True, kw_only=True):
    """Send chunks of layers [``first_layer``, ``end_layer``) of these blocks.

    Both sides cut the bytes by ``shared.transport.bulk.plan``; ``need`` lists ranges
    [first, end) of chunk numbers. ``credit`` chunks may be sent at once, more after
    ``Credit``. A higher ``attempt`` replaces what is left of an earlier one, the same
    ``attempt`` adds to it.

    With another ``codec`` than ``none`` each chunk is one encoded frame
    (``shared.kv.codecs.frame``) of K and V of one layer, and covers the first ``tokens``
    tokens of the blocks only: what follows in the last block is nobody's KV.
    """

    job: int
    attempt: int
    arena: int
    first_layer: int
    end_layer: int
    blocks: tuple[int, ...]
    generations: tuple[int, ...]
    chunk_bytes: int
    need: tuple[tuple[int, int], ...]
    credit: int
    codec: str = "none"
    tokens: int = 0


class Credit(Struct, tag="credit", frozen=True, kw_only=True):
    """The reader has room for so many more chunks of this job."""

    job: int
    attempt: int
    chunks: int


class CancelFetch(Struct, tag="cancel", frozen=True, kw_only=True):
    """Send nothing more of this job."""

    job: int


FromReader = Probe | Fetch | Credit | CancelFetch


class Chunk(Struct, tag="chunk", frozen=True, kw_only=True, gc=False):
    """Chunk number ``index``. ``checksum``: XXH3-64 of the payload as it travels.

    ``spent``: seconds it took to encode it.

    The sender compared generations after it computed the checksum, so a payload that fits
    the checksum is what was announced, whatever happened to the blocks since.
    """

    job: int
    attempt: int
    index: int
    size: int
    checksum: int
    spent: float = 0.0


class ProbeEcho(Struct, tag="echo", frozen=True, kw_only=True):
    """Answer to ``Probe``; the pool's true ``arena`` id and, if it is the one asked, a payload."""

    nonce: int
    arena: int
    size: int
    checksum: int


class FetchRefused(Struct, tag="refused", frozen=True, kw_only=True):
    """The job cannot be done. ``reused`` blocks were allocated anew since they were announced."""

    job: int
    attempt: int
    reason: Literal["arena", "generation", "invalid", "overloaded"]
    message: str
    reused: int = 0


ToReader = Chunk | ProbeEcho | FetchRefused
