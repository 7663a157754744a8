"""A worker of a later release: ``python -m tests.transport.later_worker MODULE …``

It speaks the next wire version, and names a path that this one has never heard of.
"""

import runpy
import sys
from typing import Any

from shared.messages.hello import WIRE_VERSION, Compatibility
from shared.messages.prefill_decode import PeerHello
from shared.worker import service, sources


def later_compatibility(**fields: Any) -> Compatibility:
    """Stand in for ``Compatibility``."""
    return Compatibility(**fields, wire_version=WIRE_VERSION + 1)


def later_hello(**fields: Any) -> PeerHello:
    """Stand in for ``PeerHello``: its path is no string any more."""
    return PeerHello(**fields | {"path": {"prefer": ("rdma", "host")}})


def main() -> None:
    """Run the module named first with everything after it as its arguments."""
    service.Compatibility = later_compatibility  # type: ignore[misc, assignment]
    sources.PeerHello = later_hello  # type: ignore[misc, assignment]
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
