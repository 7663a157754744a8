"""One call of a client: one or several requests whose outputs are awaited together."""

import asyncio
from collections.abc import Callable, Sequence

from msgspec import Struct, structs

from services.gateway.broker import Broker
from services.gateway.choice import Choice, Shared
from services.gateway.metrics import Metrics
from services.gateway.output_text import OutputText
from services.gateway.tokenizer import Tokenizer
from shared.errors import ErrorPayload
from shared.ids import TenantId
from shared.messages.request import Request, Sampling

SEEDS = 1 << 63

AtOnce = Callable[[Sequence[Choice]], bool]
"""Takes choices with news, or returns False and leaves them."""


class Plan(Struct, frozen=True, kw_only=True):
    """A validated call.

    ``prompts`` each run ``n`` times, with seeds ``seed``, ``seed + 1`` …; ``samplings`` has one
    entry per prompt. ``arrival`` is monotonic, ``ttl`` in seconds. ``endpoint`` labels metrics.
    """

    endpoint: str
    prompts: tuple[tuple[int, ...], ...]
    samplings: tuple[Sampling, ...]
    n: int = 1
    stops: tuple[str, ...] = ()
    tenant: TenantId
    arrival: float
    ttl: float
    force_split: bool = False


class Call:
    """The outputs of one plan, ``choices[prompt * n + i]``, and what changed among them."""

    def __init__(self, plan: Plan, broker: Broker, tokenizer: Tokenizer, metrics: Metrics) -> None:
        """Submit everything.

        Raises:
            RequestFailed: the gateway cannot take that many requests; none was submitted.
        """
        broker.require_room(len(plan.prompts) * plan.n)
        self.plan = plan
        self.cancelled = False
        self.error: ErrorPayload | None = None
        self.choices: list[Choice] = []
        self._broker = broker
        self._metrics = metrics
        self._num_ended = 0
        self._changed: dict[int, Choice] = {}
        self._at_once: AtOnce | None = None
        self._waiter: asyncio.Future[None] | None = None
        shared = Shared(
            endpoint=plan.endpoint,
            eager=False,
            arrival=plan.arrival,
            scored=plan.samplings[0].logprobs is not None,
            stopper=broker,
            metrics=metrics,
            on_change=self._on_change,
        )
        pairs = zip(plan.prompts, plan.samplings, strict=True)
        for prompt, sampling in pairs:
            for i in range(plan.n):
                output = OutputText(
                    tokenizer.detokenizer(),
                    stops=plan.stops,
                    stop_tokens=frozenset(sampling.stop_token_ids),
                    min_tokens=sampling.min_tokens,
                )
                choice = Choice(shared, broker.new_id(), len(self.choices), prompt, output)
                self.choices.append(choice)
                self._submit(choice, nth_sampling(sampling, i))

    @property
    def ended(self) -> bool:
        """Every output has ended."""
        return self._num_ended == len(self.choices)

    async def changed(self, at_once: AtOnce | None = None) -> Sequence[Choice]:
        """Wait for news and return the choices that have some, each once.

        ``at_once`` is given what comes before the end, without a switch of tasks; where it
        returns False, and for the end, this returns. Empty after ``cancel``. The state machine
        ends every request by its deadline, so this does not wait for ever.
        """
        if not self._changed and not self.cancelled:
            self._at_once = at_once
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._at_once = None
        changed, self._changed = self._changed, {}
        return () if self.cancelled else tuple(changed.values())

    async def whole(self) -> None:
        """Wait until every output ended, one failed, or the call was cancelled."""
        while not self.ended and not self.cancelled and self.error is None:
            await self.changed(at_once=lambda _: True)

    def cancel(self) -> None:
        """Cancel whatever still runs; idempotent, harmless after the end."""
        if self.cancelled:
            return
        self.cancelled = True
        for choice in self.choices:
            if choice.end is None:
                self._broker.abandon(choice.request_id)
                self._metrics.requests.labels(self.plan.endpoint, "cancelled").inc()
        self._wake()

    def _submit(self, choice: Choice, sampling: Sampling) -> None:
        plan = self.plan
        request = Request(
            request_id=choice.request_id,
            tenant=plan.tenant,
            prompt_ids=choice.prompt_ids,
            sampling=sampling,
            ttl=plan.ttl,
            force_split=plan.force_split,
        )
        self._broker.open(request, plan.arrival + plan.ttl, choice)

    def _on_change(self, choice: Choice) -> None:
        if choice.end is not None:
            self._num_ended += 1
            self.error = self.error or choice.end.error
        if not self._changed:
            self._broker.later(self._pass_on)
        self._changed[choice.index] = choice

    def _pass_on(self) -> None:
        at_once, over = self._at_once, self.cancelled or self.ended or self.error is not None
        if at_once is None or over or self._waiter is None or self._waiter.done():
            self._wake()
            return
        try:
            taken = at_once(tuple(self._changed.values()))
        except Exception as error:  # noqa: BLE001 - it is raised by ``changed``
            self._waiter.set_exception(error)
            return
        if taken:
            self._changed.clear()
        else:
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def nth_sampling(sampling: Sampling, i: int) -> Sampling:
    """Return the parameters of the ``i``-th output of a prompt: its own seed."""
    if i == 0:
        return sampling
    return structs.replace(sampling, seed=(sampling.seed + i) % SEEDS)
