"""The schema checker's process: JSON strings (schemas) in, one verdict per line out.

Ends with its standard input and, in the middle of a schema, with its parent.
"""

import ctypes
import os
import re
import resource
import signal
import sys

import msgspec
import xgrammar

from services.gateway.grammar import Verdict

_WHERE = re.compile(r"^\[[^\]]*\] \S+:\d+: ")
"""Time and source line that xgrammar puts before its messages."""
_PR_SET_PDEATHSIG = 1
_MAX_ERROR = 400
"""Characters of an error passed on: xgrammar quotes the schema, and a verdict is one line of
bounded length to its reader."""
_MEMORY = 16 << 30
"""Bytes of address space; torch maps several GiB of it before any schema is read."""


def main() -> None:
    """Answer until standard input ends."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    _answer(Verdict())
    for line in sys.stdin.buffer:
        _answer(_check(msgspec.json.decode(line, type=str)))


def _check(schema: str) -> Verdict:
    try:
        xgrammar.Grammar.from_json_schema(schema)
    except (RuntimeError, ValueError, MemoryError) as error:
        text = _WHERE.sub("", str(error)).strip()[:_MAX_ERROR]
        return Verdict(error=text or "it cannot be compiled")
    return Verdict()


def _answer(verdict: Verdict) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(verdict) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
