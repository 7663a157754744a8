"""Whether encoding pays on a given link: a pure function of measured rates.

Encoding S bytes with ratio r saves S(1 - 1/r) / B_link seconds of wire and costs
T_encode + T_decode. It pays iff B_link < S(1 - 1/r) / (T_encode + T_decode); all three terms
are proportional to S, so a link has a break-even bandwidth per codec whatever the size.
"""

import math
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from shared.kv.codecs.frame import CodecName

CodecWork = Literal["encode+decode", "decode", "overlapped"]
"""What delays the reader: both ends in turn; decoding alone (a store's entry, encoded long
before); or the slowest of encoder, wire and decoder, where layers flow through all three."""


class CodecFigures(Struct, frozen=True, kw_only=True):
    """Measured: raw bytes per encoded byte, and raw bytes per second of either end."""

    codec: CodecName
    ratio: float
    encode_rate: float
    decode_rate: float


class CodecChoice(Struct, frozen=True, kw_only=True):
    """``seconds`` until decoded, ``saved`` of them against ``none``, and the reason in words."""

    codec: CodecName
    seconds: float
    saved: float
    reason: str


def break_even(figures: CodecFigures, work: CodecWork) -> float:
    """Return the link's bytes per second below which this codec pays."""
    if figures.ratio <= 1:
        return 0.0
    if work == "overlapped":
        return min(figures.encode_rate, figures.decode_rate)
    return (1 - 1 / figures.ratio) / _seconds_per_byte(figures, work)


def choose_codec(
    size: int, link_rate: float, allowed: Sequence[CodecFigures], work: CodecWork
) -> CodecChoice:
    """Return the codec that delays the reader least, ``none`` unless another saves time.

    Args:
        size: raw KV bytes, at least 1.
        link_rate: measured bytes per second of the link.
        allowed: figures of the codecs the user permits; ``none`` always is.
        work: what the reader waits for.

    Raises:
        ValueError: a size, rate or ratio is not positive.
    """
    _require_positive("size", size)
    _require_positive("link_rate", link_rate)
    plain = size / link_rate
    best = CodecChoice(codec="none", seconds=plain, saved=0.0, reason="")
    refused = ["no other codec is allowed"] if not allowed else []
    for figures in allowed:
        for field in ("ratio", "encode_rate", "decode_rate"):
            _require_positive(f"{field} of {figures.codec}", getattr(figures, field))
        limit = break_even(figures, work)
        seconds = _seconds(size, link_rate, figures, work)
        if link_rate >= limit or seconds >= plain:
            refused.append(
                f"{figures.codec} pays below {limit / 1e6:.1f} MB/s only, "
                f"the link has {link_rate / 1e6:.1f}"
            )
        elif seconds < best.seconds:
            reason = (
                f"{figures.codec} is {figures.ratio:.2f} times smaller: {seconds * 1e3:.2f} ms "
                f"instead of {plain * 1e3:.2f} at {link_rate / 1e6:.1f} MB/s ({work})"
            )
            best = CodecChoice(
                codec=figures.codec, seconds=seconds, saved=plain - seconds, reason=reason
            )
    if best.codec != "none":
        return best
    return CodecChoice(codec="none", seconds=plain, saved=0.0, reason="; ".join(refused))


def _seconds(size: int, link_rate: float, figures: CodecFigures, work: CodecWork) -> float:
    wire = size / (figures.ratio * link_rate)
    if work == "overlapped":
        return max(wire, size / figures.encode_rate, size / figures.decode_rate)
    return wire + size * _seconds_per_byte(figures, work)


def _seconds_per_byte(figures: CodecFigures, work: CodecWork) -> float:
    encode = 1 / figures.encode_rate if work == "encode+decode" else 0.0
    return encode + 1 / figures.decode_rate


def _require_positive(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} is {value}, must be positive and finite")
