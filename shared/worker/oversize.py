"""What to do with output that is larger than a message may be."""

from collections.abc import Callable

from shared.errors import TooLarge
from shared.ids import DispatchId
from shared.messages.router_worker import SequenceFailed, StepOutput

_ERROR = TooLarge("the output of one step is larger than a message to the router may be").payload()


def divide(
    output: StepOutput, fits: Callable[[StepOutput], bool]
) -> tuple[list[StepOutput], list[DispatchId]]:
    """Return ``output`` as one message per dispatch, and the dispatches that fit none.

    For each of these the messages say that it failed; it may still run here.
    """
    parts: list[StepOutput] = []
    lost: list[DispatchId] = []
    kinds = (output.tokens, output.prefilled, output.finished, output.failed)
    for dispatch in dict.fromkeys(item.dispatch for items in kinds for item in items):
        part = StepOutput(
            step=output.step,
            tokens=tuple(t for t in output.tokens if t.dispatch == dispatch),
            prefilled=tuple(p for p in output.prefilled if p.dispatch == dispatch),
            finished=tuple(f for f in output.finished if f.dispatch == dispatch),
            failed=tuple(f for f in output.failed if f.dispatch == dispatch),
        )
        if not fits(part):
            lost.append(dispatch)
            failure = SequenceFailed(dispatch=dispatch, error=_ERROR)
            part = StepOutput(step=output.step, failed=(failure,))
        parts.append(part)
    return parts, lost
