"""Sizes, durations and addresses as people write them."""

import re
from typing import NewType

from shared.errors import BadConfig

Seconds = NewType("Seconds", float)
ByteSize = NewType("ByteSize", int)

_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_TIMES = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_size(text: object) -> ByteSize:
    """Read ``512MiB``, ``8GiB`` or a plain number of bytes; more than zero."""
    match = re.fullmatch(r"(\d+)\s*(B|KiB|MiB|GiB|TiB)?", str(text).strip(), re.ASCII)
    if match is None or int(match[1]) == 0:
        raise ValueError(f"expected a size such as 512MiB or 8GiB, got {text!r}")
    return ByteSize(int(match[1]) * _UNITS[match[2] or "B"])


def parse_duration(text: object) -> Seconds:
    """Read ``200ms``, ``30s``, ``5m`` or a plain number of seconds; more than zero."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)?", str(text).strip(), re.ASCII)
    if match is None or float(match[1]) == 0:
        raise ValueError(f"expected a duration such as 200ms or 30s, got {text!r}")
    return Seconds(float(match[1]) * _TIMES[match[2] or "s"])


def parse_address(text: str) -> tuple[str, int]:
    """Read ``host:port`` or ``[ipv6]:port``; port 0 lets the system choose."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:/\[\]]+)):(\d{1,5})", text, re.ASCII)
    if match is None or int(match[3]) > 65535:
        raise ValueError(f"expected host:port such as 127.0.0.1:8000, got {text!r}")
    return match[1] or match[2], int(match[3])


_SIZE_KEYS = {"kv_memory", "max_body", "chunk_size"}
_DURATION_KEYS = {
    "lease",
    "heartbeat",
    "stall_timeout",
    "delay",
    "worker_timeout",
    "hung_after",
    "drain_timeout",
    "no_worker_timeout",
    "request_timeout",
}
_FREE_KEYS = {"api_keys"}


def units_to_numbers(node: object, path: str) -> object:
    """Return a deployment tree with plain numbers for sizes and durations written with units.

    Raises:
        BadConfig: one cannot be read; ``path`` and its keys say where.
    """
    if isinstance(node, list):
        return [units_to_numbers(item, f"{path}[{i}]") for i, item in enumerate(node)]
    if not isinstance(node, dict):
        return node
    out: dict[object, object] = {}
    for key, value in node.items():
        where = f"{path}.{key}"
        try:
            if key in _SIZE_KEYS:
                value = parse_size(value)
            elif key in _DURATION_KEYS:
                value = parse_duration(value)
        except ValueError as error:
            raise BadConfig(f"{error} - at `{where}`") from None
        out[key] = value if key in _FREE_KEYS else units_to_numbers(value, where)
    return out
