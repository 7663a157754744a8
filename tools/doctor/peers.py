"""Check that the KV of running workers can be opened from here, as another worker would."""

import contextlib
import os
from pathlib import Path

import msgspec
from msgspec import Struct

from shared.config import Deployment
from shared.errors import ResourceMissing
from shared.kv.arena import KV_MEMFD
from shared.runtime import runtime_dir
from tools.doctor.finding import Finding, fail, ok, warn

_ROLES = ("prefill", "decode", "mixed")
_JOIN = (
    "containers must share it: `pid: service:anchor` in compose.yaml, `--pid container:NAME` "
    "with docker run, `shareProcessNamespace` in a pod"
)
_EXPLAINED = "see docs/containers.md"


class _Ready(Struct, frozen=True):
    pid: int


def check_peers(deployment: Deployment, proc: Path = Path("/proc")) -> list[Finding]:
    """Try to open the memory of every worker that has a ready file; none of them: no finding.

    ``proc`` is where proc is mounted.
    """
    opened = []
    for role in _ROLES:
        for path in sorted(runtime_dir(deployment).glob(f"{role}-*.ready")):
            try:
                pid = msgspec.json.decode(path.read_bytes(), type=_Ready).pid
                open_kv(path.stem, pid, proc)
            except ResourceMissing as error:
                level = fail if deployment.transfer.path == "ipc" else warn
                return [level("kv sharing", f"{error.message}; {_EXPLAINED}")]
            except (OSError, msgspec.MsgspecError):
                continue  # it ended just now
            opened.append(path.stem)
    if not opened:
        return []
    return [ok("kv sharing", f"the memory of {', '.join(opened)} can be opened")]


def open_kv(name: str, pid: int, proc: Path) -> None:
    """Open the KV memory of worker ``name`` read-only and close it again.

    Raises:
        ResourceMissing: its process cannot be seen or its memory not opened from here, and why.
    """
    place = proc / str(pid)
    kind = {"mixed": "decode"}.get(name.partition("-")[0], name.partition("-")[0])
    try:
        arguments = (place / "cmdline").read_bytes().split(b"\0")
    except OSError:
        arguments = []
    if f"services.{kind}".encode() not in arguments:
        raise ResourceMissing(
            f"{name} runs as process {pid}, but no such process is here: it died, or it is in "
            f"another pid namespace; {_JOIN}"
        )
    try:
        descriptors = list((place / "fd").iterdir())
    except OSError as error:
        raise ResourceMissing(
            f"the memory of {name} (process {pid}) may not be opened: {error.strerror}; all "
            "workers need the same user, the same capabilities, and proc without hidepid"
        ) from error
    for descriptor in descriptors:
        with contextlib.suppress(FileNotFoundError):  # closed while we look
            if os.readlink(descriptor).startswith(f"/memfd:{KV_MEMFD}"):
                _open(name, descriptor)
                return
    raise ResourceMissing(f"process {pid} of {name} holds no KV memory")


def _open(name: str, descriptor: Path) -> None:
    try:
        os.close(os.open(descriptor, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        raise ResourceMissing(
            f"the memory of {name} may not be opened ({descriptor}: {error.strerror}): a "
            "security module such as SELinux keeps the containers apart; start them with one label"
        ) from error
