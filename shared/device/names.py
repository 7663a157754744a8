"""How a deployment file names devices, and what may be asked of them. Imports no torch."""

import re
from typing import Final

from shared.errors import BadConfig

DEVICE_PATTERN: Final = r"^(cpu|cuda(:[0-9]{1,2})?)$"


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
        return None
    if precision in ("int8", "int4"):
        return f"`precision: {precision}` is for CPUs: on a GPU use bf16, fp16 or fp32"
    if kv_dtype == "int8":
        return "`kv_dtype: int8` is for CPUs: on a GPU use bf16, fp16 or fp32"
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
