"""Text of an output: what a client reads must not depend on how tokens happen to arrive."""

import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.gateway.detokenize import WindowDetokenizer
from services.gateway.output_text import OutputText
from services.gateway.stop_strings import StopMatcher
from services.gateway.tokenizer import Tokenizer
from shared.engine.model_files import resolve_model
from shared.errors import UnsupportedModel
from tests.unit.gateway_model import NAME
from tests.unit.gateway_model import tokenizer as tokenizer

same_tokenizer = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=200
)
ids = st.lists(st.integers(0, 49151), max_size=40)
texts = st.text(alphabet="abAB .\n€🦙é", max_size=40)
stop_sets = st.lists(st.text(alphabet="abAB .é🦙", min_size=1, max_size=4), min_size=1, max_size=4)


def reference(tokenizer: Tokenizer, tokens: list[int]) -> str:
    return str(tokenizer._tokenizer.decode(tokens, skip_special_tokens=True))


@same_tokenizer
@given(ids)
def test_one_by_one_equals_whole_for_any_tokens(tokenizer: Tokenizer, tokens: list[int]) -> None:
    """Invalid UTF-8 between or inside tokens must come out as the tokenizer itself shows it."""
    assert tokenizer.decode(tokens) == reference(tokenizer, tokens)


@same_tokenizer
@given(st.text(max_size=60))
def test_round_trip_of_text(tokenizer: Tokenizer, text: str) -> None:
    tokens = list(tokenizer.encode(text))
    assert tokenizer.decode(tokens) == reference(tokenizer, tokens)
    assert tokenizer.least_tokens(text) <= len(tokens)


@same_tokenizer
@given(ids)
def test_window_decoder_equals_whole(tokenizer: Tokenizer, tokens: list[int]) -> None:
    """The decoder for tokenizers that are not byte-level, on the same real vocabulary."""
    window = WindowDetokenizer(tokenizer._decode_window, tokenizer._special)
    text = "".join([window.push(token) for token in tokens]) + window.flush()
    assert text == reference(tokenizer, tokens)


def test_half_a_character_is_held_back(tokenizer: Tokenizer) -> None:
    """A client must never see a replacement character for a character still on its way."""
    tokens = tokenizer.encode("🦙")
    assert len(tokens) > 1
    detokenizer = tokenizer.detokenizer()
    parts = [detokenizer.push(token) for token in tokens]
    assert parts == [""] * (len(tokens) - 1) + ["🦙"]


def test_special_and_unknown_tokens_have_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([2, 0, 10**6, -1]) == ""
    assert tokenizer.token_bytes(2) == b"<|im_end|>"
    assert tokenizer.token_bytes(10**6) == b""


def naive(text: str, stops: list[str]) -> tuple[str, bool]:
    """Character by character: the first completed stop string, the longest of several."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@given(texts, stop_sets, st.data())
def test_stop_strings_do_not_depend_on_chunks(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    """A stop string across chunks must be found, and never leak its first characters."""
    matcher = StopMatcher(stops)
    want, matched = naive(text, stops)
    out, rest = "", text
    while rest and not matcher.matched:
        size = data.draw(st.integers(1, len(rest)))
        out += matcher.push(rest[:size])
        rest = rest[size:]
        assert want.startswith(out)
    if not matcher.matched:
        out += matcher.flush()
    assert (out, matcher.matched) == (want, matched)


def test_nothing_is_held_back_without_reason() -> None:
    """Text that cannot become a stop string must not wait: it would delay the stream."""
    matcher = StopMatcher(["END"])
    assert matcher.push("abc") == "abc"
    assert matcher.push("dE") == "d"
    assert matcher.push("x") == "Ex"
    assert matcher.push("EN") == ""
    assert matcher.flush() == "EN"


@same_tokenizer
@given(ids, stop_sets, st.integers(0, 10), st.integers(0, 40))
def test_replay_gives_the_same_state(
    tokenizer: Tokenizer, tokens: list[int], stops: list[str], min_tokens: int, cut: int
) -> None:
    """A resumed request replays its tokens and must go on exactly where it was."""

    def fresh() -> OutputText:
        return OutputText(
            tokenizer.detokenizer(), stops=stops, stop_tokens={2}, min_tokens=min_tokens
        )

    def feed(output: OutputText, some: list[int]) -> str:
        text = ""
        for token in some:
            if not output.stopped:
                text += output.push(token)
        return text

    once, resumed = fresh(), fresh()
    whole = feed(once, tokens)
    before = feed(resumed, tokens[:cut])
    assert resumed.length == len(before)
    assert before + feed(resumed, tokens[cut:]) == whole
    assert (once.num_tokens, once.stopped, once.finish()) == (
        resumed.num_tokens,
        resumed.stopped,
        resumed.finish(),
    )


def test_usage_counts_up_to_the_token_that_completed_the_stop(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("one two three four")
    output = OutputText(tokenizer.detokenizer(), stops=["two"])
    text = ""
    for token in tokens:
        if not output.stopped:
            text += output.push(token)
    assert (text, output.num_tokens) == ("one ", 2)


def test_end_token_has_no_text(tokenizer: Tokenizer) -> None:
    """A client's own stop token must be counted but not shown."""
    word = tokenizer.encode(" two")[0]
    output = OutputText(tokenizer.detokenizer(), stop_tokens={word})
    assert output.push(word) == ""
    assert (output.num_tokens, output.finish()) == (1, "")


def test_stop_strings_wait_for_min_tokens(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("a.b.c.d.")
    output = OutputText(tokenizer.detokenizer(), stops=["."], min_tokens=5)
    text = ""
    for token in tokens:
        if not output.stopped:
            text += output.push(token)
    assert output.num_tokens >= 5
    assert text.startswith("a.b.c")


def test_chat_template_of_the_model(tokenizer: Tokenizer) -> None:
    """Compared with what transformers' apply_chat_template gives for this model."""
    text = tokenizer.chat_text([{"role": "user", "content": "hi"}])
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
        "Face<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.encode(text, add_special_tokens=False)[:2] == (1, 9690)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_damaged_model_files_are_refused_with_their_name(
    tokenizer: Tokenizer, tmp_path: Path, name: str
) -> None:
    for source in resolve_model(NAME).glob("*.json"):
        shutil.copy(source, tmp_path)
    (tmp_path / name).write_text("{")
    with pytest.raises(UnsupportedModel, match=name):
        Tokenizer(tmp_path)
