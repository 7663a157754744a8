"""Which kernels a processor can run, by what Linux tells of it."""

import platform
from collections.abc import Collection
from typing import Final

_X86: Final = ("x86_64", "AMD64")

NEEDED: Final[dict[str, tuple[str, ...]]] = {
    "generic": (),
    "avx2": ("avx2", "fma", "f16c"),
    "avx512": ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"),
    "avx512bf16": ("avx512_bf16",),
    "amx": ("amx_bf16", "amx_tile", "amx_int8"),
}
"""Flags of each tier beside those of the tiers before it, worst first."""


def runnable(flags: Collection[str]) -> list[str]:
    """Return the tiers that a CPU with these flags runs, worst first."""
    found: list[str] = []
    for tier, needed in NEEDED.items():
        if not set(needed) <= set(flags) or (found and platform.machine() not in _X86):
            break
        found.append(tier)
    return found
