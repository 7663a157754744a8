"""Random numbers are those of the published generator, and a function of (seed, index)."""

import numpy as np
import pytest

from shared.engine.sampling.philox import philox, uniforms

# Random123 1.14, tests/kat_vectors, "philox4x32 10": counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_published_vectors(
    counter: tuple[int, ...], key: tuple[int, int], result: tuple[int, ...]
) -> None:
    """A wrong constant or shift still looks random."""
    words = philox(
        (np.array([key[0]], dtype=np.uint64), np.array([key[1]], dtype=np.uint64)),
        tuple(np.array([c], dtype=np.uint64) for c in counter),
    )
    assert tuple(int(w[0]) for w in words) == result


def test_numbers_do_not_depend_on_the_batch() -> None:
    """A resumed or re-batched sequence must draw what it would have drawn."""
    seeds, indices = [5, 2**63 + 7, 5, 0], [0, 3, 10**6, 2**40]
    together = uniforms(seeds, indices)
    alone = [uniforms([s], [i])[0] for s, i in zip(seeds, indices, strict=True)]
    assert together.tolist() == alone
    assert len(set(alone)) == len(alone)


def test_seeds_of_any_size_are_taken() -> None:
    """OpenAI clients send negative seeds."""
    numbers = uniforms([-1, 2**64 - 1, 2**64 + 5, 5], [0] * 4)
    assert numbers[0] == numbers[1]
    assert numbers[2] == numbers[3]


def test_numbers_are_uniform_along_a_stream_and_across_seeds() -> None:
    """Chi-square over 64 cells with 63 degrees of freedom; 99.9 % quantile is 103.4."""
    n = 64_000
    for numbers in (uniforms([9] * n, range(n)), uniforms(range(n), [1] * n)):
        assert 0 <= numbers.min() <= numbers.max() < 1
        counts = np.bincount((numbers * 64).astype(int), minlength=64)
        assert ((counts - n / 64) ** 2 / (n / 64)).sum() < 103.4
