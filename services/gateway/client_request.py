"""One request of an SDK client, from ``Submit`` to ``Ended``."""

import msgspec
from msgspec import Struct, structs

from diptych import wire
from services.gateway.choice import Choice, Shared
from services.gateway.decoding import convert
from services.gateway.events import Finished
from services.gateway.front import Front
from services.gateway.output_text import OutputText
from services.gateway.response_format import make_grammar
from services.gateway.sampling_params import (
    Extras,
    NumLogprobs,
    SamplingOptions,
    make_sampling,
    stop_strings,
)
from shared.errors import ErrorPayload, InvalidRequest
from shared.ids import TenantId
from shared.messages.request import FinishReason, Grammar, Request, Sampling, TokenLogprob


class Prepared(Struct, frozen=True, kw_only=True):
    """A validated submission."""

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    stops: tuple[str, ...]
    ttl: float


class _Scores(Struct, frozen=True):
    logprobs: NumLogprobs | None = None
    prompt_logprobs: NumLogprobs | None = None


async def prepare(front: Front, submit: wire.Submit) -> Prepared:
    """Tokenise and validate.

    Raises:
        InvalidRequest: with the offending field in ``param``.
        Overloaded: too many JSON schemas are being checked.
    """
    params = structs.asdict(submit.params)
    params.pop("response_format")
    options = convert(params, SamplingOptions)
    scores = convert(params, _Scores)
    timeout = front.served.request_timeout
    if submit.timeout is not None:
        if not submit.timeout > 0:
            raise InvalidRequest("timeout must be more than 0 seconds", param="timeout")
        timeout = min(timeout, submit.timeout)
    ids = await _prompt_ids(front, submit)
    extras = Extras(
        logprobs=scores.logprobs,
        prompt_logprobs=scores.prompt_logprobs,
        grammar=await _grammar(front, submit.params.response_format),
    )
    limits = front.served.limits
    sampling = make_sampling(options, extras, len(ids), limits)
    if len(submit.received) > sampling.max_tokens:
        raise InvalidRequest("received holds more than max_tokens tokens", param="received")
    if any(not 0 <= token < limits.vocab_size for token in submit.received):
        raise InvalidRequest("a token id is outside the vocabulary", param="received")
    return Prepared(prompt_ids=ids, sampling=sampling, stops=stop_strings(options), ttl=timeout)


class ClientRequest:
    """A running submission; knows what its client has already been sent."""

    def __init__(
        self, front: Front, submit: wire.Submit, ready: Prepared, shared: Shared, tenant: TenantId
    ) -> None:
        self.id = submit.id
        self._front = front
        self._submit = submit
        self._ready = ready
        output = OutputText(
            front.tokenizer.detokenizer(),
            stops=ready.stops,
            stop_tokens=frozenset(ready.sampling.stop_token_ids),
            min_tokens=ready.sampling.min_tokens,
        )
        self.choice = Choice(shared, front.broker.new_id(), submit.id, ready.prompt_ids, output)
        self._tenant = tenant
        for token in submit.received:
            if output.stopped:
                break
            output.push(token)
        self._tokens_sent = output.num_tokens
        self._text_sent = output.length
        self._scored_prompt = False

    @property
    def already(self) -> FinishReason | None:
        """How the output ended if ``received`` is already all of it."""
        sampling, received = self._ready.sampling, self._submit.received
        ended = received and received[-1] in sampling.stop_token_ids
        if self.choice.output.stopped or ended:
            return "stop"
        total = len(self._ready.prompt_ids) + len(received)
        full = len(received) >= sampling.max_tokens
        return "length" if full or total >= self._front.served.limits.max_model_len else None

    def accepted(self) -> wire.Accepted:
        """Return the answer to a valid submission."""
        ids = self._ready.prompt_ids
        return wire.Accepted(
            id=self.id,
            seed=self._ready.sampling.seed,
            prompt_tokens=len(ids),
            prompt_ids=None if self._submit.token_ids is not None else ids,
        )

    def start(self) -> None:
        """Hand the request to the router."""
        ready = self._ready
        request = Request(
            request_id=self.choice.request_id,
            tenant=self._tenant,
            prompt_ids=ready.prompt_ids,
            sampling=ready.sampling,
            output_ids=self._submit.received,
            ttl=ready.ttl,
        )
        broker = self._front.broker
        broker.open(request, broker.clock.now() + ready.ttl, self.choice)

    def end_early(self) -> None:
        """End without the router: ``received`` is the whole output."""
        broker, request_id = self._front.broker, self.choice.request_id
        done = Finished(request_id=request_id, reason=self.already)
        self.choice.on_end(done, broker.clock.now())

    def prompt_scores(self) -> wire.PromptLogprobs | None:
        """Return the prompt's log probabilities once, when they are here."""
        known = self.choice.prompt_logprobs
        if known is None or self._scored_prompt:
            return None
        self._scored_prompt = True
        pairs = zip(self._ready.prompt_ids[1:], known, strict=False)
        return wire.PromptLogprobs(
            id=self.id, items=tuple(self._score(token, score) for token, score in pairs)
        )

    def delta(self) -> wire.DeltaItem | None:
        """Return new tokens, None when there are none or the prompt's scores come first."""
        awaited = self._ready.sampling.prompt_logprobs is not None and not self._submit.received
        if awaited and not self._scored_prompt and self.choice.end is None:
            return None
        piece = self.choice.take_piece()
        if not piece.tokens:
            return None
        index, text_at = self._tokens_sent, self._text_sent
        self._tokens_sent += len(piece.tokens)
        self._text_sent += len(piece.text)
        scores = None
        if self._ready.sampling.logprobs is not None:
            pairs = zip(piece.tokens, piece.logprobs, strict=True)
            scores = tuple(self._score(t, s or TokenLogprob(float("-inf"))) for t, s in pairs)
        return wire.DeltaItem(self.id, index, tuple(piece.tokens), text_at, piece.text, scores)

    def ended(self) -> wire.Ended:
        """Return the terminal message of a request whose choice has ended or was cancelled."""
        choice, end = self.choice, self.choice.end
        usage = wire.Usage(
            prompt_tokens=len(self._ready.prompt_ids),
            completion_tokens=choice.num_tokens,
            cached_tokens=0 if end is None else end.num_cached_tokens,
        )
        timeline = None
        if end is not None and end.timeline is not None and self._submit.timeline:
            timeline = convert(msgspec.to_builtins(end.timeline), wire.Timeline)
        return wire.Ended(
            id=self.id,
            reason=choice.finish_reason,
            error=None if end is None else wire_error(end.error),
            num_tokens=choice.num_tokens,
            text_at=self._text_sent,
            text=choice.tail,
            usage=usage,
            timeline=timeline,
        )

    def _score(self, token: int, score: TokenLogprob) -> wire.Logprob:
        top = tuple(wire.TopLogprob(t, self._name(t), value) for t, value in score.top)
        return wire.Logprob(token, self._name(token), score.logprob, top)

    def _name(self, token: int) -> str:
        return self._front.tokenizer.token_bytes(token).decode("utf-8", "replace")


def wire_error(error: ErrorPayload | None) -> wire.WireError | None:
    """Return an error as clients read it."""
    if error is None:
        return None
    return wire.WireError(
        code=error.code,
        message=error.message,
        retryable=error.retryable,
        param=error.param,
        retry_after=error.retry_after,
    )


async def _prompt_ids(front: Front, submit: wire.Submit) -> tuple[int, ...]:
    given = [p for p in (submit.prompt, submit.token_ids, submit.messages) if p is not None]
    if len(given) != 1:
        raise InvalidRequest(
            "exactly one of prompt, token_ids and messages must be given", param="prompt"
        )
    if submit.token_ids is not None:
        return front.check_prompt_ids(submit.token_ids, "token_ids")
    if submit.messages is not None:
        if not submit.messages:
            raise InvalidRequest("there are no messages", param="messages")
        return await front.chat_prompt([_message(message) for message in submit.messages])
    if not submit.prompt:
        raise InvalidRequest("the prompt is empty", param="prompt")
    return await front.encode(submit.prompt, "prompt")


def _message(message: wire.Message) -> dict[str, str]:
    plain = {"role": message.role, "content": message.content}
    return plain if message.name is None else plain | {"name": message.name}


async def _grammar(front: Front, form: wire.ResponseFormat | None) -> Grammar | None:
    if form is None:
        return None
    return await make_grammar(front.grammar, form.kind, form.schema, "response_format.schema")
