"""One open request as the gateway keeps it."""

from msgspec import Struct, structs

from shared.ids import RequestId
from shared.messages.request import FinishReason, Request


class OpenRequest(Struct):
    """A request, its output so far, and how the router currently knows it.

    ``wire_id`` None: the router does not have it. ``stop_until``: a stop string ended it and
    the router's last word is awaited until then. ``retry_at``: when to offer it again after
    it was turned away, at most until ``patience``.
    """

    request: Request
    deadline: float
    output: list[int]
    wire_id: RequestId | None = None
    attempts: int = 0
    faults: int = 0
    stop_until: float | None = None
    retry_at: float | None = None
    patience: float | None = None
    prompt_logprobs_seen: bool = False

    @property
    def resumed(self) -> bool:
        """It was under way before, so its client must not see a transient refusal."""
        return self.attempts > 1 or bool(self.output)

    def due(self, *, connected: bool) -> float:
        """Return when time alone changes something; nothing is offered to an absent router."""
        if self.stop_until is not None:
            return self.stop_until
        if self.retry_at is None or not connected:
            return self.deadline
        return min(self.deadline, self.retry_at)

    def whole(self, max_model_len: int) -> FinishReason | None:
        """Tell whether the output is already complete (its ``Ended`` was then lost)."""
        output, sampling = self.output, self.request.sampling
        if output and output[-1] in sampling.stop_token_ids:
            return "stop"
        full = len(output) >= sampling.max_tokens
        if full or len(self.request.prompt_ids) + len(output) >= max_model_len:
            return "length"
        return None

    def rest(self, wire_id: RequestId, now: float) -> Request:
        """Return what is left to do as a request of its own."""
        sampling = self.request.sampling
        if self.prompt_logprobs_seen:
            sampling = structs.replace(sampling, prompt_logprobs=None)
        return structs.replace(
            self.request,
            request_id=wire_id,
            sampling=sampling,
            output_ids=tuple(self.output),
            ttl=max(0.0, self.deadline - now),
        )
