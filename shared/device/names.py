"""How a deployment file names devices, and what may be asked of them. Imports no torch."""

import re
from typing import Final

from shared.errors import BadConfig

DEVICE_PATTERN: Final = r"^(cpu|cuda(:[0-9]{1,2})?)$"
FP8_CAPABILITY: Final = (8, 9)
"""Compute capability of the first GPUs that multiply e4m3."""


def device_index(name: str) -> int | None:
    """Return the number in ``cuda:1``, 0 for ``cuda``, None for ``cpu``.

    Raises:
        BadConfig: no device is called so.
    """
    if re.match(DEVICE_PATTERN, name, re.ASCII) is None:
        raise BadConfig(f"`device` may be cpu, cuda or cuda:N, not {name!r}")
    kind, _, number = name.partition(":")
    return None if kind == "cpu" else int(number or 0)


def device_problem(device: str, precision: str, kv_dtype: str | None) -> str | None:
    """Say what a worker on ``device`` cannot do, and what to write instead."""
    if device == "cpu":
        if precision == "fp8":
            return "`precision: fp8` is for GPUs: on a CPU use int8, int4 or bf16"
        if kv_dtype == "fp8":
            return "`kv_dtype: fp8` is for GPUs: on a CPU use int8, bf16 or fp16"
        return None
    if precision in ("int8", "int4"):
        return f"`precision: {precision}` is for CPUs: on a GPU use fp8, bf16, fp16 or fp32"
    if kv_dtype == "int8":
        return "`kv_dtype: int8` is for CPUs: on a GPU use fp8, bf16, fp16 or fp32"
    return None


def capability_problem(
    capability: tuple[int, int], precision: str, kv_dtype: str | None
) -> str | None:
    """Say what a GPU of this compute capability cannot do, and what to write instead."""
    if capability >= FP8_CAPABILITY:
        return None
    has = f"this GPU has {capability[0]}.{capability[1]}: use bf16 or fp16"
    for key, value in (("precision", precision), ("kv_dtype", kv_dtype)):
        if value == "fp8":
            return f"`{key}: fp8` needs compute capability 8.9 (Ada or Hopper) or newer, and {has}"
    return None


def transfer_problem(path: str, codec: str, *, cuda: tuple[bool, bool]) -> str | None:
    """Say which part of ``transfer`` cannot carry KV of a GPU; ``cuda``: prefill's, decode's."""
    if not any(cuda):
        return None
    if path == "nixl":
        return "`transfer.path: nixl` is for KV in the machine's memory: use auto, ipc or host"
    if path == "ipc" and not all(cuda):
        return (
            "`transfer.path: ipc` needs the KV of both roles in GPUs' memory, or of both in the "
            "machine's: use auto or host"
        )
    if codec not in ("none", "auto"):
        return f"`transfer.codec: {codec}` is for CPUs: KV of a GPU travels as it is, use none"
    return None
