"""What both copiers do around a copy: the faults asked for, and the event that answers it."""

import logging
import time
from collections.abc import Callable

from shared.errors import DeviceLost, DiptychError, ErrorPayload, TransferFailed
from shared.transport.bulk.faults import FaultyCopies
from shared.worker.effects import Copy
from shared.worker.events import Copied, CopyFailed

log = logging.getLogger(__name__)


def outcome_of(job: Copy, move: Callable[[Copy], tuple[int, int]]) -> Copied | CopyFailed:
    """Run a copy; ``move`` returns the bytes that came, and how many blocks of them are void.

    Raises:
        DeviceLost: nobody can say what the copy still writes; the job must not be answered.
    """
    begun = time.monotonic()
    try:
        copied, reused = move(job)
    except DeviceLost:
        raise
    except DiptychError as error:
        return CopyFailed(job.job, error.payload())
    except Exception as error:
        log.exception("copy job %d failed", job.job)
        return CopyFailed(job.job, copy_failed(error))
    if reused:
        text = f"{job.source.worker} used {reused} blocks anew while they were copied"
        return CopyFailed(job.job, TransferFailed(text).payload(), reused)
    return Copied(job.job, copied, time.monotonic() - begun)


def harm(faults: FaultyCopies | None, pid: int) -> bool:
    """Do what the deployment file asks for to a copy (``faults:``). True: it counts as stale.

    Raises:
        TransferFailed: the copy is to fail.
    """
    kind = None if faults is None else faults.after_copy(pid)
    if kind == "fail":
        raise TransferFailed("a fault was injected into the copy (`faults:`)")
    return kind == "stale"


def copy_failed(error: Exception) -> ErrorPayload:
    """Return what a copy that failed unforeseen is answered with."""
    return TransferFailed(f"the KV copy failed: {type(error).__name__}: {error}").payload()
