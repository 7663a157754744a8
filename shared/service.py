"""What every Diptych process does around its own work: arguments, signals, logs, ready file."""

import argparse
import asyncio
import ctypes
import gc
import logging
import os
import resource
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import uvloop
from msgspec import Struct

from shared.errors import DiptychError
from shared.ids import Incarnation

log = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_REFUSED = 2
"""Config or resources are wrong: starting again without a change is of no use."""

_PR_SET_PDEATHSIG = 1
_DESCRIPTORS = 65536
"""As many as a gateway with a crowd of clients needs; login shells often allow 1,024."""
_YOUNG_OBJECTS = 5000
"""New objects between two collections; CPython's 700 are those of a few tokens for 64 streams."""


class ServiceFailed(Exception):
    """The service cannot go on, but a fresh start may: exit code 1 and this sentence."""


class ServiceArguments(Struct, frozen=True, kw_only=True):
    """The command line every service understands.

    ``die_with_parent`` None is off, 0 is on, a pid also refuses a parent that died before us.
    """

    config: Path
    name: str | None = None
    die_with_parent: int | None = None


def parse_arguments(service: str, argv: list[str] | None = None) -> ServiceArguments:
    """Read ``--config FILE [--name NAME] [--die-with-parent [PID]]``; exits 2 when wrong."""
    parser = argparse.ArgumentParser(prog=f"python -m services.{service}")
    parser.add_argument("--config", required=True, type=Path, help="deployment file")
    parser.add_argument("--name", help=f"which {service} this is, such as {service}-0, or auto")
    parser.add_argument(
        "--die-with-parent",
        nargs="?",
        type=int,
        const=0,
        metavar="PID",
        help="stop when the parent process ends",
    )
    found = parser.parse_args(argv)
    return ServiceArguments(
        config=found.config, name=found.name, die_with_parent=found.die_with_parent
    )


def run_service(
    main: Callable[[asyncio.Event], Awaitable[None]],
    name: str,
    *,
    die_with_parent: int | None = None,
) -> int:
    """Run ``main`` on uvloop until it returns and give the exit code.

    ``main`` gets an event that SIGTERM and SIGINT set; it then drains and returns. A
    ``DiptychError`` becomes one sentence on stderr and exit code 2, ``ServiceFailed`` one
    sentence and exit code 1, anything else a traceback and exit code 1.
    """
    set_up_logging(name)
    _allow_descriptors()
    if die_with_parent is not None and not _follow_parent(die_with_parent):
        return EXIT_OK
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_with_signals(main))
    except DiptychError as error:
        print(f"error: {error.message}", file=sys.stderr, flush=True)
        return EXIT_REFUSED
    except ServiceFailed as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_FAILED
    except Exception:
        log.exception("%s ends on an unexpected error", name)
        return EXIT_FAILED
    return EXIT_OK


def set_up_logging(name: str) -> None:
    """Send one line per event to stderr: time, service, level, message."""
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format=f"%(asctime)s {name} %(levelname)s %(message)s",
        force=True,
    )


def settle_heap() -> None:
    """Keep what was loaded at the start out of every later garbage collection.

    For processes whose work makes many short-lived objects; call once, when ready.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS)


class ReadyFile:
    """``<directory>/<name>.ready``: present while the service can do its work."""

    def __init__(self, directory: Path, name: str) -> None:
        self._path = directory / f"{name}.ready"

    def write(self, incarnation: Incarnation, **facts: str) -> None:
        """Put ``{"pid", "incarnation", **facts}`` there in one step; the folder is made 0700."""
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        content = {"pid": os.getpid(), "incarnation": incarnation, **facts}
        fresh = self._path.with_suffix(f".ready.{os.getpid()}")
        fresh.write_bytes(msgspec.json.encode(content) + b"\n")
        fresh.replace(self._path)

    def remove(self) -> None:
        """Take it away if it is this process's own; a successor's file stays."""
        try:
            content = msgspec.json.decode(self._path.read_bytes(), type=dict[str, object])
        except (OSError, msgspec.MsgspecError):
            return
        if content.get("pid") == os.getpid():
            self._path.unlink(missing_ok=True)


async def _with_signals(main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        await main(stop)
    finally:  # a second signal while the process winds up must not change its exit code
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)


def _allow_descriptors() -> None:
    """Raise the soft limit of open files as far as is of use and this user may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _follow_parent(expected: int) -> bool:
    """Ask the kernel for SIGTERM at the parent's end; False when it has already ended."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        log.warning("cannot follow the parent's life: %s", os.strerror(ctypes.get_errno()))
    return expected in (0, os.getppid())
