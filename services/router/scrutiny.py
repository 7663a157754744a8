"""What the router asks of workers' output before it believes it.

A process that computes nonsense, or is not what it says, must not break streams of others, and
not its own without a word. Each check returns what is wrong, None if nothing is.
"""

from collections.abc import Iterable

from services.router.records import Leg, OpenRequest
from shared.errors import ErrorPayload
from shared.messages.request import TokenLogprob
from shared.messages.router_worker import Prefilled, SequenceFinished, TokenOut

UNKNOWN_VOCABULARY = 1 << 32
"""Bound of token ids from workers that do not declare their vocabulary."""


def vocabulary(leg: Leg) -> int:
    """Return the bound of the token ids this leg's worker may send."""
    return leg.worker.hello.vocab_size or UNKNOWN_VOCABULARY


def token_fault(leg: Leg, out: TokenOut) -> str | None:
    """Check a token that is the next one or an earlier one."""
    request = leg.open
    index = request.num_output
    if out.index > index:
        return "sent a token that does not connect to the output"
    if index >= request.limit and out.index >= index:
        return "sent a token beyond max_tokens"
    if not 0 <= out.token < vocabulary(leg):
        return "sent a token outside its vocabulary"
    if out.logprob is not None and not _well_formed((out.logprob,), vocabulary(leg)):
        return "sent log probabilities that are none"
    return None


def prefilled_fault(leg: Leg, message: Prefilled) -> str | None:
    """Check the end of a prefill, after the tokens that came with it."""
    if not leg.streaming:
        return "ended a prefill without its token"
    return _prompt_fault(leg, message.prompt_logprobs)


def finished_fault(leg: Leg, message: SequenceFinished) -> str | None:
    """Check the end of an output, after the tokens that came with it."""
    request = leg.open
    if not request.num_output:
        return "ended an output without a token"
    if message.reason == "stop" and not _stopped(request):
        return "ended an output by a token that does not end it"
    if message.reason == "length" and leg.kind != "expect" and not _full(leg):
        return "ended an output before its length"
    return _prompt_fault(leg, message.prompt_logprobs)


def violation(leg: Leg, fault: str) -> ErrorPayload:
    """Return the error of a leg whose output cannot be believed."""
    message = f"{leg.worker.hello.worker} {fault}"
    return ErrorPayload(code="worker_lost", message=message, retryable=True)


def _stopped(request: OpenRequest) -> bool:
    last = request.items[-1].token if request.items else request.request.output_ids[-1]
    return last in request.request.sampling.stop_token_ids


def _full(leg: Leg) -> bool:
    """An expect leg's output may also end where its prefill worker's model length does."""
    request = leg.open
    if request.num_output >= request.limit:
        return True
    return request.num_tokens >= leg.worker.hello.max_model_len


def _prompt_fault(leg: Leg, items: tuple[TokenLogprob, ...]) -> str | None:
    if not items:
        return None
    request = leg.open.request
    if request.sampling.prompt_logprobs is None:
        return "scored a prompt unasked"
    if len(items) != len(request.prompt_ids) - 1 or not _well_formed(items, vocabulary(leg)):
        return "sent log probabilities that do not fit the prompt"
    return None


def _well_formed(items: Iterable[TokenLogprob], bound: int) -> bool:
    """Numbers, for tokens that exist: NaN is none, minus infinity is one."""
    for item in items:
        if item.logprob != item.logprob:
            return False
        for token, logprob in item.top:
            if not 0 <= token < bound or logprob != logprob:
                return False
    return True
