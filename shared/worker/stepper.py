"""The one engine step in flight: what goes in, and what its result means for sequences."""

from msgspec import Struct

from shared.engine.batch import (
    OpenSequence,
    Sampled,
    SequenceInput,
    StepInput,
    StepResult,
)
from shared.errors import ErrorPayload
from shared.messages.request import TokenLogprob
from shared.worker.ledger import BlockLedger
from shared.worker.limits import Tally
from shared.worker.scheduler import Chunk
from shared.worker.sequence import Sequence


class Advanced(Struct, frozen=True):
    """A live sequence after a step: one of a token, an error, or more prompt to come."""

    sequence: Sequence
    sampled: Sampled | None
    error: ErrorPayload | None


class Stepper:
    """Numbers steps from 1 and keeps the engine's per-sequence state opened and closed."""

    def __init__(self, ledger: BlockLedger, tally: Tally) -> None:
        self._ledger = ledger
        self._tally = tally
        self._closed: list[int] = []
        self.step = 0
        self.chunks: list[Chunk] = []

    @property
    def busy(self) -> bool:
        """True while a step is in flight."""
        return bool(self.chunks)

    def close(self, sequence: Sequence) -> None:
        """Have the engine forget the sequence's sampler state with the next step."""
        if sequence.opened:
            sequence.opened = False
            self._closed.append(sequence.key)

    def begin(self, chunks: list[Chunk], now: float) -> StepInput:
        """Put ``chunks`` in flight and return the engine's input."""
        self.step += 1
        self.chunks = chunks
        opened: list[OpenSequence] = []
        inputs: list[SequenceInput] = []
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.in_step = True
            if sequence.started is None and sequence.transferred is None:
                sequence.started = now
            if not sequence.opened:
                sequence.opened = True
                opened.append(_open(sequence))
            inputs.append(
                SequenceInput(
                    sequence.key,
                    tuple(sequence.tokens[chunk.start : chunk.start + chunk.count]),
                    chunk.start,
                    tuple(sequence.blocks),
                    chunk.sample,
                )
            )
        closed, self._closed = tuple(self._closed), []
        return StepInput(opened=tuple(opened), closed=closed, sequences=tuple(inputs))

    def finish(self, result: StepResult) -> list[Advanced]:
        """Book the result; blocks of sequences that ended meanwhile are given back."""
        sampled = {item.key: item for item in result.sampled}
        failed = dict(result.failed)
        logprobs = dict(result.prompt_logprobs)
        self._tally.steps += 1
        advanced: list[Advanced] = []
        for chunk in self._land():
            sequence = chunk.sequence
            error = failed.get(sequence.key)
            if error is None and chunk.sample and sequence.key not in sampled:
                error = ErrorPayload(code="internal", message="the engine returned no token")
            if error is None:
                self._advance(chunk, logprobs.get(sequence.key, ()))
            elif sequence.key in failed:
                sequence.opened = False  # the engine has dropped it already
            token = sampled.get(sequence.key) if chunk.sample and error is None else None
            advanced.append(Advanced(sequence, token, error))
        return advanced

    def abandon(self) -> list[Sequence]:
        """End a step that raised; return its live sequences, whose KV is worth nothing."""
        return [chunk.sequence for chunk in self._land()]

    def _land(self) -> list[Chunk]:
        chunks, self.chunks = self.chunks, []
        for chunk in chunks:
            chunk.sequence.in_step = False
            if chunk.sequence.phase == "ended":
                self._ledger.release(chunk.sequence)
        return [chunk for chunk in chunks if chunk.sequence.phase != "ended"]

    def _advance(self, chunk: Chunk, logprobs: tuple[TokenLogprob, ...]) -> None:
        sequence = chunk.sequence
        if sequence.wants_prompt_logprobs and logprobs:
            sequence.add_prompt_logprobs(chunk.start, logprobs)
        sequence.computed = chunk.start + chunk.count
        self._tally.prompt_tokens += max(
            0, min(sequence.computed, sequence.prompt_tokens) - chunk.start
        )
        self._ledger.seal(sequence)


def _open(sequence: Sequence) -> OpenSequence:
    return OpenSequence(
        sequence.key,
        sequence.request.sampling,
        tuple(sequence.tokens[: sequence.prompt_tokens]),
        tuple(sequence.tokens[sequence.prompt_tokens :]),
    )
