"""What every front end (HTTP, SDK link, readiness probe) needs to run a request."""

import asyncio
from collections.abc import Sequence

from msgspec import Struct

from services.gateway.auth import Keys
from services.gateway.broker import Broker
from services.gateway.call import Call, Plan
from services.gateway.errors import ContextLengthExceeded, ModelNotFound
from services.gateway.grammar import GrammarChecker
from services.gateway.metrics import Metrics
from services.gateway.sampling_params import TokenLimits, check_prompt_length
from services.gateway.tokenizer import Tokenizer
from shared.clock import Clock
from shared.errors import InvalidRequest

MAX_OUTPUTS = 256
"""Requests one call may start (prompts times n)."""
_LONG_TEXT = 20_000
"""Characters from which on tokenising (5 ms) leaves the event loop."""


class Served(Struct, frozen=True, kw_only=True):
    """What is served. ``created`` is Unix time, ``request_timeout`` in seconds."""

    model: str
    created: int
    limits: TokenLimits
    max_body: int
    request_timeout: float


class Front:
    """The shared parts of a gateway, and the steps from raw input to a running call."""

    def __init__(
        self,
        served: Served,
        tokenizer: Tokenizer,
        broker: Broker,
        keys: Keys,
        *,
        clock: Clock,
    ) -> None:
        self.served = served
        self.tokenizer = tokenizer
        self.broker = broker
        self.keys = keys
        self.clock = clock
        self.metrics = Metrics()
        self.grammar = GrammarChecker()
        self._encoders = asyncio.Semaphore(2)

    def check_model(self, name: str | None) -> None:
        """Raise ``ModelNotFound`` unless ``name`` is the served model (or left out)."""
        if name is not None and name != self.served.model:
            raise ModelNotFound(
                f"the model {name!r} does not exist here; served is {self.served.model!r}",
                param="model",
            )

    async def encode(self, text: str, param: str) -> tuple[int, ...]:
        """Return the prompt ids of a text, special tokens added.

        Raises:
            InvalidRequest: empty, or too long for the context.
        """
        return await self._encode(text, param, add_special_tokens=True)

    async def chat_prompt(self, messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
        """Return the prompt ids of a conversation.

        Raises:
            InvalidRequest: no chat template, refused by it, or too long for the context.
        """
        text = self.tokenizer.chat_text(messages)
        return await self._encode(text, "messages", add_special_tokens=False)

    def check_prompt_ids(self, ids: Sequence[int], param: str) -> tuple[int, ...]:
        """Check token ids a client sent. Raises ``InvalidRequest``."""
        check_prompt_length(len(ids), self.served.limits, param)
        vocab_size = self.served.limits.vocab_size
        for token in ids:
            if not 0 <= token < vocab_size:
                raise InvalidRequest(
                    f"token id {token} is outside the vocabulary (0 to {vocab_size - 1})",
                    param=param,
                )
        return tuple(ids)

    def call(self, plan: Plan) -> Call:
        """Start a call. Raises ``RequestFailed`` when there is no room for it."""
        return Call(plan, self.broker, self.tokenizer, self.metrics)

    async def _encode(self, text: str, param: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        limits = self.served.limits
        least = self.tokenizer.least_tokens(text)
        if least + 1 > limits.max_model_len:
            raise ContextLengthExceeded(
                f"this model's maximum context length is {limits.max_model_len} tokens, but the "
                f"prompt has at least {least}",
                param=param,
            )
        if len(text) < _LONG_TEXT:
            ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        else:
            async with self._encoders:
                ids = await asyncio.to_thread(
                    self.tokenizer.encode, text, add_special_tokens=add_special_tokens
                )
        check_prompt_length(len(ids), limits, param)
        return ids
