"""Small parts of the gateway: timelines, templates, tokenizers that are not byte-level."""

import json

import msgspec
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from tokenizers import decoders, models

from services.gateway.answers import (
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatDelta,
    Completion,
    CompletionChoice,
)
from services.gateway.chat_template import ChatTemplate
from services.gateway.chunk_template import MARK, ChunkTemplate
from services.gateway.detokenize import WindowDetokenizer
from services.gateway.errors import ContextLengthExceeded, RequestFailed, http_error
from services.gateway.histogram import TokenHistogram
from services.gateway.sampling_params import (
    Extras,
    SamplingOptions,
    TokenLimits,
    make_sampling,
)
from services.gateway.timeline import Moments, make_timeline
from shared.errors import ErrorPayload, InvalidRequest, UnsupportedModel
from shared.messages.gateway_router import RequestTimeline
from shared.messages.request import PhaseTimes


def test_phases_of_a_split_request_add_up_to_ttft() -> None:
    known = RequestTimeline(
        received=10.01,
        split=True,
        prefill=PhaseTimes(started=10.2, prefilled=10.5),
        decode=PhaseTimes(transferred=10.52, stepped=10.6),
    )
    timeline = make_timeline(Moments(arrival=10.0, first_token=10.51, last_token=11.0), known)
    phases, second = timeline.phases, timeline.second_token
    assert phases is not None and second is not None and timeline.ttft is not None
    total = phases.queue + phases.prefill + phases.transfer + phases.first_step
    assert total == pytest.approx(timeline.ttft)
    assert (second.transfer, second.first_step) == pytest.approx((0.02, 0.08))


def test_colocated_request_has_its_phases_from_the_one_worker() -> None:
    known = RequestTimeline(received=10.0, decode=PhaseTimes(started=10.2, prefilled=10.5))
    timeline = make_timeline(Moments(arrival=10.0, first_token=10.6), known)
    assert timeline.phases is not None and timeline.second_token is None
    assert timeline.phases.prefill == pytest.approx(0.3)


def test_moments_that_do_not_fit_give_no_phases() -> None:
    """After a resume, or between hosts, negative phases would be nonsense."""
    known = RequestTimeline(received=10.0, prefill=PhaseTimes(started=12.0, prefilled=12.5))
    assert make_timeline(Moments(arrival=10.0, first_token=10.6), known).phases is None
    assert make_timeline(Moments(arrival=10.0), known).ttft is None


def test_prompt_scores_that_fit_no_frame_are_refused() -> None:
    """The worker's answer exceeded its largest frame, and the worker ended: one after another."""
    limits = TokenLimits(max_model_len=131_072, vocab_size=100, eos_token_ids=())
    extras = Extras(prompt_logprobs=20)
    with pytest.raises(InvalidRequest) as refused:
        make_sampling(SamplingOptions(max_tokens=1), extras, 32_000, limits)
    assert refused.value.param == "logprobs"
    make_sampling(SamplingOptions(max_tokens=1), extras, 8_192, limits)
    make_sampling(SamplingOptions(max_tokens=1), Extras(prompt_logprobs=0), 131_000, limits)


def test_template_that_refuses_messages_is_the_clients_error() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(InvalidRequest, match="roles must alternate") as refused:
        template.render([{"role": "user", "content": "x"}])
    assert refused.value.param == "messages"


def test_template_cannot_reach_the_interpreter() -> None:
    """A model's template is data from elsewhere: the sandbox must hold."""
    source = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(InvalidRequest):
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])


def test_broken_template_is_refused_at_load() -> None:
    with pytest.raises(UnsupportedModel, match="does not compile"):
        ChatTemplate("{% for %}", {})


WORDS = ["▁the", "▁fox", "a", "b", "▁", "é", "ab▁"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def sentence_piece_like() -> tokenizers.Tokenizer:
    """A tokenizer with the decoder of Llama 2, Mistral and Gemma."""
    vocabulary = {piece: i for i, piece in enumerate([*WORDS, *BYTES])}
    made = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return made


TOKENIZER = sentence_piece_like()
characters = st.sampled_from("€🦙é\n").map(
    lambda text: [len(WORDS) + byte for byte in text.encode()]
)
pieces = st.lists(st.integers(0, len(WORDS) - 1).map(lambda i: [i]) | characters, max_size=20)


@given(pieces)
def test_window_decoder_on_byte_fallback(parts: list[list[int]]) -> None:
    """Leading spaces and characters spelled as bytes must come out as in the whole text."""
    tokens = [token for part in parts for token in part]
    window = WindowDetokenizer(TOKENIZER.decode, frozenset())
    text = "".join([window.push(token) for token in tokens]) + window.flush()
    assert text == TOKENIZER.decode(tokens)


def test_errors_have_openai_shape() -> None:
    error = http_error(ContextLengthExceeded("too long", param="prompt"))
    assert (error.status, error.headers) == (400, {})
    assert json.loads(error.body) == {
        "error": {
            "message": "too long",
            "type": "invalid_request_error",
            "param": "prompt",
            "code": "context_length_exceeded",
        }
    }
    busy = http_error(RequestFailed(ErrorPayload(code="overloaded", message="x", retry_after=0.2)))
    assert (busy.status, busy.headers) == (429, {"retry-after": "1"})


@given(
    index=st.integers(0, 1000),
    text=st.text(),
    model=st.text() | st.just('"index":0'),
    usage=st.booleans(),
)
def test_an_event_from_a_template_is_the_encoded_document(
    index: int, text: str, model: str, usage: bool
) -> None:
    """A text with quotes, controls or the name of the mark must not break out of its string.

    Nor may a choice get another one's index.
    """

    def completion(index: int, text: str) -> Completion:
        part = CompletionChoice(index, text)
        none = None if usage else msgspec.UNSET
        return Completion(id="i", created=1, model=model, choices=[part], usage=none)

    def chat(index: int, text: str) -> ChatCompletionChunk:
        part = ChatChunkChoice(index, ChatDelta(content=text))
        return ChatCompletionChunk(id="i", created=1, model=model, choices=[part])

    for make in (completion, chat):
        document = msgspec.json.encode(make(index, text))
        assert ChunkTemplate(make(0, MARK)).fill(index, text) == b"data: " + document + b"\n\n"


@given(values=st.lists(st.floats(0, 20) | st.sampled_from([0.1, 1.0, 10.0])))
def test_the_histogram_of_tokens_reads_like_prometheus_own(values: list[float]) -> None:
    pages = []
    for kind in (Histogram, TokenHistogram):
        registry = CollectorRegistry()
        histogram = kind("gap_seconds", "Gaps.", buckets=(0.1, 1.0, 10.0), registry=registry)
        for value in values:
            histogram.observe(value)
        page = generate_latest(registry).decode().splitlines()
        pages.append([line.partition(" 1.")[0] if "_created" in line else line for line in page])
    assert pages[0] == pages[1]
