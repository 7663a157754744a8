"""What one engine step is given and what it returns; keys are chosen by the scheduler."""

from msgspec import Struct

from shared.errors import ErrorPayload
from shared.messages.request import Sampling, TokenLogprob


class OpenSequence(Struct, frozen=True):
    """Start of a sequence's sampler state; ``output_ids`` are tokens produced before (resume).

    Token ``i`` of the output is drawn with random number ``i`` of ``sampling.seed``; a resumed
    sequence goes on at ``i = len(output_ids)``.
    """

    key: int
    sampling: Sampling
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...] = ()


class SequenceInput(Struct, frozen=True):
    """Tokens of one sequence to run in this step: a prompt chunk or one decode token.

    ``start`` is the position of ``tokens[0]``; KV of the positions before it is in the blocks
    of ``block_table``, which must also cover the new tokens. ``sample`` asks for the token that
    follows ``tokens[-1]``. Blocks wholly below a layer's sliding window are never read.
    """

    key: int
    tokens: tuple[int, ...]
    start: int
    block_table: tuple[int, ...]
    sample: bool


class StepInput(Struct, frozen=True):
    """One step. ``closed`` is applied first, then ``opened``; so a key may be reopened."""

    opened: tuple[OpenSequence, ...] = ()
    closed: tuple[int, ...] = ()
    sequences: tuple[SequenceInput, ...] = ()


class Sampled(Struct, frozen=True, gc=False):
    """The token that follows a sequence, already accepted into its sampler state."""

    key: int
    token: int
    logprob: TokenLogprob | None = None


class StepResult(Struct, frozen=True):
    """``sampled`` in the order of ``StepInput.sequences``.

    A key in ``failed`` got no token and its sampler state is gone: the scheduler drops it.
    ``prompt_logprobs`` of a chunk [start, end) are those of prompt tokens start+1 … end (the
    last prompt token at most): the chunks of a prompt add up to ``len(prompt_ids) - 1`` entries,
    since nothing precedes token 0. Such a prompt must be computed from position 0.
    """

    sampled: tuple[Sampled, ...] = ()
    failed: tuple[tuple[int, ErrorPayload], ...] = ()
    prompt_logprobs: tuple[tuple[int, tuple[TokenLogprob, ...]], ...] = ()
