"""``python -m tools.health RUN_DIR``: is the service of this container usable? For HEALTHCHECK.

The service is found by its ready file: its process is one that shares this process's mount
namespace. A gateway is also asked for ``/readyz``. Only the standard library is imported, since
this runs every few seconds.
"""

import http.client
import json
import os
import sys
import urllib.parse
from pathlib import Path

_TIMEOUT = 20.0


def check(directory: Path, proc: Path = Path("/proc")) -> str | None:
    """Return None when a service of this container is ready, else why it is not."""
    for path in sorted(directory.glob("*.ready")):
        try:
            facts = dict(json.loads(path.read_bytes()))
            if not _is_here(int(facts["pid"]), path.stem, proc):
                continue
        except (OSError, TypeError, ValueError, KeyError):
            continue  # it just ended, or is another container's
        return _ask(str(facts["url"])) if "url" in facts else None
    return f"no service of this container is ready in {directory}"


def _is_here(pid: int, name: str, proc: Path) -> bool:
    """Tell whether ``pid`` is the service ``name`` and sees the same files as this process."""
    kind = {"mixed": "decode"}.get(name.partition("-")[0], name.partition("-")[0])
    arguments = (proc / str(pid) / "cmdline").read_bytes().split(b"\0")
    mounts = [os.readlink(proc / who / "ns/mnt") for who in (str(pid), "self")]
    return f"services.{kind}".encode() in arguments and mounts[0] == mounts[1]


def _ask(url: str) -> str | None:
    place = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(
        place.hostname or "127.0.0.1", place.port, timeout=_TIMEOUT
    )
    try:
        connection.request("GET", "/readyz")
        answer = connection.getresponse()
        text = answer.read(4096).decode(errors="replace").strip()
    except (OSError, http.client.HTTPException) as error:
        return f"{url}/readyz does not answer: {error}"
    finally:
        connection.close()
    return None if answer.status == 200 else f"{url}/readyz says {answer.status}: {text}"


def main() -> int:
    """Return 0 when ready, else 1 and a sentence on stdout, which engines keep."""
    problem = check(Path(sys.argv[1]))
    print(problem or "ready")
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
