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


def device_problem(device: str, precision: str, *, split: bool) -> str | None:
    """Say what a worker on ``device`` cannot do yet, and what to write instead."""
    if device == "cpu":
        return None
    if split:
        return (
            "KV in a GPU's memory does not move between processes yet: "
            "use `deployment_type: colocated`, or `device: cpu`"
        )
    if precision == "int8":
        return "`precision: int8` is for CPUs: on a GPU use bf16, fp16 or fp32"
    return None
