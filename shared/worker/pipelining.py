"""Which layers are announced together, and whether announcing layer by layer pays. Pure."""

from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from statistics import median
from typing import Final

from msgspec import Struct

from shared.messages.fleet import PipelineReason, PipelineRule

LEAST_BYTES: Final = 1 << 20
MOST_ANNOUNCEMENTS: Final = 8
"""Of one chunk. Fewer leave more to copy after the last layer, more cost both workers a message
and a copy job each: some 0.1 ms."""

_ENOUGH: Final = 3
_REMEMBERED: Final = 5
_ALTERNATING: Final = 8
_OTHER_EVERY: Final = 16
_LEAST_SHARE: Final = 0.1
_LEAST_SECONDS: Final = 100e-6
"""What pipelining has to spare. It costs messages, and cores that compute meanwhile, which the
time seen by requests does not show."""


def announced_layers(
    layer_bytes: Sequence[int], tokens: int, fixed: int | None = None
) -> tuple[int, ...]:
    """Return after how many layers of a chunk of ``tokens`` tokens its KV is announced.

    As often as it has ``LEAST_BYTES``, at most ``MOST_ANNOUNCEMENTS`` times; the last is that of
    all layers, always. Pieces shrink evenly, to one of n(n+1)/2 parts: what a request waits for is
    the last ones, and what an early one is late by, the link makes up for while prefill computes.

    Args:
        layer_bytes: bytes of one token's KV, per layer; 0 where a layer stores none.
        tokens: of the chunk.
        fixed: announce every so many layers instead.
    """
    layers = len(layer_bytes)
    if fixed is not None:
        return (*range(fixed, layers, fixed), layers)
    before = (0, *accumulate(layer_bytes))
    count = min(MOST_ANNOUNCEMENTS, max(1, -(-before[-1] * tokens // LEAST_BYTES)))
    ends: list[int] = []
    for left in range(count - 1, 0, -1):
        wanted = before[-1] * (1 - left * (left + 1) / (count * (count + 1)))
        end = min(range(layers), key=lambda layer: abs(before[layer] - wanted))
        if end > max(ends, default=0):
            ends.append(end)
    return (*ends, layers)


class _Arm(Struct):
    """Hand-overs of one size and way. ``seconds``: what the newest of them let a request wait."""

    seconds: deque[float]
    chosen: int = 0


class _Size(Struct):
    on: _Arm
    off: _Arm
    chosen: int = 0


class PipelineGate:
    """Decides for each hand-over of a pair whether layers are announced while prefill computes.

    ``auto`` tries both ways in turn, then takes what lets requests wait for less, by medians of
    the newest hand-overs of about that length (a factor of two), and tries the other one every
    16th time, so that a link that changes is noticed.
    """

    def __init__(self, rule: PipelineRule) -> None:
        self._rule = rule
        self._sizes: dict[int, _Size] = {}
        self.reason: PipelineReason = "measuring" if rule == "auto" else "configured"

    def choose(self, tokens: int) -> bool:
        """Return whether the next hand-over, of ``tokens`` tokens, is pipelined."""
        if self._rule != "auto":
            return self._rule
        size = self._of(tokens)
        size.chosen += 1
        wins = self._wins(size)
        if size.chosen % _OTHER_EVERY == 0:
            wins = not wins
        (size.on if wins else size.off).chosen += 1
        return wins

    def arrived(self, tokens: int, visible: float, *, pipelined: bool) -> None:
        """A hand-over arrived ``visible`` seconds after its prefill ended."""
        size = self._of(tokens)
        (size.on if pipelined else size.off).seconds.append(visible)

    def _wins(self, size: _Size) -> bool:
        if min(len(size.on.seconds), len(size.off.seconds)) < _ENOUGH:
            self.reason = "measuring"
            return size.chosen > _ALTERNATING or size.on.chosen <= size.off.chosen
        with_it, without = median(size.on.seconds), median(size.off.seconds)
        wins = without - with_it > max(_LEAST_SECONDS, _LEAST_SHARE * without)
        self.reason = "faster" if wins else "not_faster"
        return wins

    def _of(self, tokens: int) -> _Size:
        size = self._sizes.get(tokens.bit_length())
        if size is None:
            size = _Size(_Arm(deque(maxlen=_REMEMBERED)), _Arm(deque(maxlen=_REMEMBERED)))
            self._sizes[tokens.bit_length()] = size
        return size
