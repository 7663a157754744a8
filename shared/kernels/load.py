"""Load the native kernels once per process, or say once why there are none."""

import functools
import sys
from typing import Any

import torch

from shared.kernels.build import KernelsUnavailable, build


@functools.cache
def native() -> bool:
    """Return True once ``torch.ops.diptych`` is there; False, told once on stderr, otherwise.

    The first call may compile for up to a minute.
    """
    try:
        torch.ops.load_library(str(build()))  # type: ignore[no-untyped-call]
    except (KernelsUnavailable, OSError) as error:
        print(
            f"warning: native kernels are not available, the slower torch ones are used: {error}",
            file=sys.stderr,
            flush=True,
        )
        return False
    return True


def operators() -> Any:  # noqa: ANN401
    """Return the namespace of native operators; only where ``native()`` is True."""
    return torch.ops.diptych


def tier() -> str:
    """Return the instruction set level in use: ``torch`` without native kernels."""
    return str(operators().tier()) if native() else "torch"
