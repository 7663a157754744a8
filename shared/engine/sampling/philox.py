"""Counter-based random numbers: number ``i`` of a seed needs no state and no history.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): the key
is the 64-bit seed, the counter is the index.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS: Final = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL: Final = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW: Final = np.uint64(0xFFFFFFFF)
_HALF: Final = np.uint64(32)
_ROUNDS: Final = 10
_MASK64: Final = (1 << 64) - 1

Words = NDArray[np.uint64]


def philox(key: tuple[Words, Words], counter: tuple[Words, ...]) -> tuple[Words, ...]:
    """Return four 32-bit words (in uint64 arrays) for 32-bit key and counter words."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (p1 >> _HALF) ^ c1 ^ k0,
            p1 & _LOW,
            (p0 >> _HALF) ^ c3 ^ k1,
            p0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def uniforms(seeds: Sequence[int], indices: Sequence[int]) -> NDArray[np.float64]:
    """Return number ``indices[j]`` of the stream ``seeds[j]``: uniform on [0, 1), 53 bits.

    Seeds count modulo 2**64. One call serves a whole batch.
    """
    seed = np.array([s & _MASK64 for s in seeds], dtype=np.uint64)
    index = np.array([i & _MASK64 for i in indices], dtype=np.uint64)
    zero = np.zeros_like(index)
    words = philox((seed & _LOW, seed >> _HALF), (index & _LOW, index >> _HALF, zero, zero))
    high, low = words[0] >> np.uint64(5), words[1] >> np.uint64(6)
    numbers: NDArray[np.float64] = (
        high.astype(np.float64) * 67108864.0 + low.astype(np.float64)
    ) * 2.0**-53
    return numbers
