"""What a pair's link and codecs do per second, and which codec that makes worth while. Pure."""

from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import Struct

from shared.kv.codecs.frame import CodecName
from shared.kv.codecs.planner import CodecFigures, choose_codec

AUTO_CODECS: Final[tuple[CodecName, ...]] = ("int8", "k8v4", "k4v4")
"""What ``auto`` chooses from. ``sparse`` loses whole tokens and ``cachegen`` is slower than most
links: both are there for who names them."""

_HEADROOM: Final = 2.0
"""How much faster than the link an encoder and a decoder have to be. They get less of a core
once an engine is busy beside them, and the first chunk's encoding and the last one's decoding
overlap with nothing."""

_SAMPLE: Final = 256 << 10
_PLAIN_EVERY: Final = 16
_CHUNK_WEIGHT: Final = 1 / 16


class _Busy(Struct):
    """Bytes and seconds while jobs of one pair are open; ``spoilt`` once one is encoded."""

    jobs: int = 0
    begun: float = 0.0
    wire: int = 0
    spoilt: bool = False


class PairRates:
    """The rates of one pair, from its own traffic.

    The link's rate is that of unencoded bytes while at least one job is open, so that an encoder
    is never taken for the link; every 16th job travels plain to measure it anew.
    """

    def __init__(self, figures: Sequence[CodecFigures]) -> None:
        self._figures = {one.codec: one for one in figures}
        self._busy = _Busy()
        self._jobs = 0
        self.link_rate: float | None = None
        self.reason = "the rate of the link is not known yet"

    def choose(self, size: int) -> CodecName:
        """Return the codec for a job of ``size`` raw bytes."""
        self._jobs += 1
        if self.link_rate is None or size < 1 or self._jobs % _PLAIN_EVERY == 0:
            return "none"
        allowed = tuple(_with_headroom(one) for one in self._figures.values())
        choice = choose_codec(size, self.link_rate, allowed, "overlapped")
        self.reason = choice.reason
        return choice.codec

    def begun(self, codec: CodecName, now: float) -> None:
        """A job is asked for."""
        busy = self._busy
        if busy.jobs == 0:
            self._busy = busy = _Busy(begun=now)
        busy.jobs += 1
        busy.spoilt = busy.spoilt or codec != "none"

    def arrived(self, wire: int) -> None:
        """A verified chunk of so many bytes came."""
        self._busy.wire += wire

    def coded(self, codec: CodecName, raw: int, wire: int, encode: float, decode: float) -> None:
        """A chunk of ``raw`` bytes was encoded to ``wire`` and decoded, in so many seconds."""
        known = self._figures.get(codec)
        if known is None or not min(raw, wire, encode, decode) > 0:
            return
        self._figures[codec] = msgspec.structs.replace(
            known,
            ratio=_mean(known.ratio, raw / wire),
            encode_rate=_mean(known.encode_rate, raw / encode),
            decode_rate=_mean(known.decode_rate, raw / decode),
        )

    def over(self, now: float) -> None:
        """A job is done or failed."""
        busy = self._busy
        busy.jobs = max(0, busy.jobs - 1)
        seconds = now - busy.begun
        if busy.spoilt or busy.wire < _SAMPLE or seconds <= 0:
            return
        rate = busy.wire / seconds  # of a job or more: newer ones weigh half
        self.link_rate = rate if self.link_rate is None else (self.link_rate + rate) / 2
        busy.begun, busy.wire = now, 0


def _with_headroom(figures: CodecFigures) -> CodecFigures:
    return msgspec.structs.replace(
        figures,
        encode_rate=figures.encode_rate / _HEADROOM,
        decode_rate=figures.decode_rate / _HEADROOM,
    )


def _mean(known: float, new: float) -> float:
    """Return the rate at which a chunk takes the mean time: one that had to wait weighs little."""
    return 1 / ((1 - _CHUNK_WEIGHT) / known + _CHUNK_WEIGHT / new)
