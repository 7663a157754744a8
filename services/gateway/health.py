"""`/readyz`: a real generation through prefill and decode, not "the port answers"."""

import asyncio

from msgspec import Struct

from services.gateway.auth import LOCAL
from services.gateway.call import Call, Plan
from services.gateway.errors import RequestFailed
from services.gateway.front import Front
from services.gateway.metrics import Metrics
from shared.messages.request import Sampling

PROBE_DEADLINE = 5.0
"""Seconds a probe may take."""
RECENT = 2.0
"""Seconds since decode's last token within which it counts as working."""
CACHE_TIME = 1.0
"""Seconds a result is valid."""
_PROBE_TOKENS = 2
"""The second token is decode's own, so the KV has travelled."""


class Health(Struct, frozen=True):
    """``busy``: the probe got no turn, but decode makes progress with other requests."""

    ready: bool
    status: str


class Readiness:
    """Probes at most one at a time and answers all who ask meanwhile with its result."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._prompt = front.tokenizer.encode("ready")
        self._unseen = Metrics()
        self._lock = asyncio.Lock()
        self._last: tuple[float, Health] | None = None

    async def check(self) -> Health:
        """Return whether requests can be served right now."""
        async with self._lock:
            now = self._front.clock.now()
            if self._last is not None and now - self._last[0] < CACHE_TIME:
                return self._last[1]
            health = await self._probe()
            self._last = (self._front.clock.now(), health)
            return health

    async def _probe(self) -> Health:
        state = self._front.broker.state
        if state.draining:
            return Health(False, "draining")
        try:
            call = Call(self._plan(), self._front.broker, self._front.tokenizer, self._unseen)
        except RequestFailed as error:
            return self._failed(error.payload.code, error.payload.message)
        try:
            async with asyncio.timeout(PROBE_DEADLINE):
                await call.whole()
        except TimeoutError:
            if self._front.clock.now() - state.decoded_at < RECENT:
                return Health(True, "busy")
            return Health(False, f"no answer within {PROBE_DEADLINE:g} s")
        finally:
            call.cancel()
        return self._judge(call)

    def _judge(self, call: Call) -> Health:
        if call.error is not None:
            return self._failed(call.error.code, call.error.message)
        got = call.choices[0].num_tokens
        if got != _PROBE_TOKENS:
            return Health(False, f"the probe got {got} tokens instead of {_PROBE_TOKENS}")
        return Health(True, "ready")

    def _failed(self, code: str, message: str) -> Health:
        return Health(True, "busy") if code == "overloaded" else Health(False, message)

    def _plan(self) -> Plan:
        return Plan(
            endpoint="readyz",
            prompts=(self._prompt,),
            samplings=(Sampling(seed=0, max_tokens=_PROBE_TOKENS, temperature=0.0),),
            tenant=LOCAL,
            arrival=self._front.clock.now(),
            ttl=PROBE_DEADLINE,
            force_split=True,
        )
