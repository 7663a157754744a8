"""What a request gives back."""

from msgspec import Struct

from diptych.errors import error_from
from diptych.events import Fleet, Ready, Update
from diptych.open_request import Failed, Finished, Output, PromptScores, Started
from diptych.wire import FinishReason, Logprob, Timeline, Usage


class Chunk(Struct, frozen=True, kw_only=True):
    """A piece of output, mostly one token.

    ``index`` is the position of ``token_ids[0]`` in the output. ``text`` may be empty (half a
    character, a possible stop string) and is then part of a later chunk; the last chunk may
    have text and no token. ``logprobs`` has one entry per token where asked for.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[Logprob, ...] | None = None


class Completion(Struct, frozen=True, kw_only=True):
    """A whole output.

    ``token_ids`` includes the end token or those of the stop string, ``text`` does not.
    ``logprobs[i]`` belongs to ``token_ids[i]``; ``prompt_logprobs[i]`` to prompt token
    ``i + 1``. ``resumes`` counts how often the stream was continued after a lost connection.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    seed: int
    logprobs: tuple[Logprob, ...] | None = None
    prompt_logprobs: tuple[Logprob, ...] | None = None
    timeline: Timeline | None = None
    resumes: int = 0


class Assembler:
    """Turns the updates of one request into chunks and, at the end, a completion."""

    def __init__(self) -> None:
        self.completion: Completion | None = None
        self._seed = 0
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[Logprob] = []
        self._prompt_logprobs: tuple[Logprob, ...] | None = None

    def feed(self, update: Update) -> Chunk | None:
        """Take the next update. Raises the request's ``DiptychError`` if it failed."""
        match update:
            case Started():
                self._seed = update.seed
            case PromptScores():
                self._prompt_logprobs = update.items
            case Output():
                self._tokens += update.tokens
                self._logprobs += update.logprobs or ()
                self._text.append(update.text)
                return Chunk(
                    index=update.index,
                    token_ids=update.tokens,
                    text=update.text,
                    logprobs=update.logprobs,
                )
            case Finished():
                return self._finish(update)
            case Failed():
                raise error_from(update.error)
            case Ready() | Fleet():
                raise AssertionError("not an update of a request")
        return None

    def _finish(self, end: Finished) -> Chunk | None:
        self._text.append(end.text)
        self.completion = Completion(
            text="".join(self._text),
            token_ids=tuple(self._tokens),
            finish_reason=end.reason,
            usage=end.usage,
            seed=self._seed,
            logprobs=tuple(self._logprobs) if self._logprobs else None,
            prompt_logprobs=self._prompt_logprobs,
            timeline=end.timeline,
            resumes=end.resumes,
        )
        if not end.text:
            return None
        return Chunk(index=len(self._tokens), token_ids=(), text=end.text)
