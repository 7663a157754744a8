"""One dispatch on one worker: its tokens, its blocks and where it stands."""

from typing import Literal

from shared.ids import BlockId, DispatchId
from shared.kv.hashing import HashChain
from shared.messages.request import FinishReason, PhaseTimes, Request, TokenLogprob

Kind = Literal["run", "prefill", "expect"]
Phase = Literal["expecting", "lost", "waiting", "receiving", "running", "ended"]


class Sequence:
    """Mutable; owned by ``WorkerState``, changed by its collaborators.

    ``kind``: ``run`` computes and decodes here, ``prefill`` computes here and is decoded
    elsewhere, ``expect`` waits for KV from elsewhere (and is a ``run`` once it has it).

    ``phase``: ``expecting`` (nothing announced yet) or ``lost`` (needs another source), then
    ``waiting`` for blocks, ``receiving`` KV, ``running``, and ``ended``.

    KV of tokens [0, ``computed``) is in ``blocks``, of which the first ``sealed`` are in the
    prefix cache. ``order`` is the seniority: the oldest is never held back by a younger one.
    Blocks before ``whole_from`` lack layers whose window has passed them.
    """

    __slots__ = (
        "accepted",
        "blocks",
        "cached",
        "computed",
        "deadline",
        "dispatch",
        "finished",
        "hashes",
        "in_step",
        "key",
        "kind",
        "opened",
        "order",
        "phase",
        "prefilled",
        "prompt_logprobs",
        "prompt_tokens",
        "request",
        "sealed",
        "started",
        "stepped",
        "stops",
        "tokens",
        "transferred",
        "wants_prompt_logprobs",
        "whole_from",
    )

    def __init__(
        self, dispatch: DispatchId, request: Request, kind: Kind, *, order: int, now: float
    ) -> None:
        self.dispatch = dispatch
        self.request = request
        self.kind: Kind = kind
        self.phase: Phase = "expecting" if kind == "expect" else "waiting"
        self.order = order
        self.key = order
        self.deadline = now + request.ttl
        self.tokens = [*request.prompt_ids, *request.output_ids]
        self.prompt_tokens = len(request.prompt_ids)
        self.stops = frozenset(request.sampling.stop_token_ids)
        self.blocks: list[BlockId] = []
        self.computed = 0
        self.sealed = 0
        self.whole_from = 0
        self.cached: int | None = None
        self.hashes: HashChain | None = None
        self.opened = False
        self.in_step = False
        self.wants_prompt_logprobs = (
            kind != "expect" and request.sampling.prompt_logprobs is not None
        )
        self.prompt_logprobs: list[TokenLogprob] = []
        self.accepted = now
        self.started: float | None = None
        self.prefilled: float | None = None
        self.transferred: float | None = None
        self.stepped: float | None = None
        self.finished: float | None = None

    @property
    def pending(self) -> int:
        """Tokens whose KV is still to be computed; the last of them yields the next token."""
        return len(self.tokens) - self.computed

    @property
    def outputs(self) -> int:
        """Output tokens so far, resumed ones included; the index of the next."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that came from a prefix cache."""
        return min(self.cached or 0, self.prompt_tokens)

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """True while prompt tokens must be computed for their log probabilities."""
        return self.wants_prompt_logprobs and len(self.prompt_logprobs) < self.prompt_tokens - 1

    def finish_reason(self, max_model_len: int) -> FinishReason | None:
        """Return why no further token may follow, or None."""
        if self.outputs == 0:
            return None
        if self.tokens[-1] in self.stops:
            return "stop"
        if self.outputs >= self.request.sampling.max_tokens or len(self.tokens) >= max_model_len:
            return "length"
        return None

    def sampled(self, token: int, at: float) -> int:
        """Append an output token and return its index."""
        index = self.outputs
        self.tokens.append(token)
        if self.prefilled is None and self.transferred is None:
            self.prefilled = at
        elif self.transferred is not None and self.stepped is None:
            self.stepped = at
        self.finished = at
        return index

    def add_prompt_logprobs(self, start: int, items: tuple[TokenLogprob, ...]) -> None:
        """Add those of prompt tokens ``start + 1`` …; repeated ones (recomputed) are skipped."""
        self.prompt_logprobs.extend(items[len(self.prompt_logprobs) - start :])

    def times(self) -> PhaseTimes:
        """Return the moments so far."""
        return PhaseTimes(
            accepted=self.accepted,
            started=self.started,
            prefilled=self.prefilled,
            transferred=self.transferred,
            stepped=self.stepped,
            finished=self.finished,
        )
