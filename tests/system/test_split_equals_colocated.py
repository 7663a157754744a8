"""What a client sees must not tell whether a request was split (scenarios 77, 78, 79)."""

import json
from typing import Any

import pytest

from diptych import Client, Completion
from tests.system.asking import SAMPLED, answers
from tests.system.conftest import GoldenCase
from tests.system.fleet import Fleet

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "people": {"type": "integer"}},
    "required": ["city", "people"],
    "additionalProperties": False,
}


def both(
    colocated: Fleet, split: Fleet, prompt: str | list[int], **params: Any
) -> tuple[Completion, Completion]:
    """Ask the same of a colocated and of a split deployment."""
    out = []
    for fleet in (colocated, split):
        with Client(fleet.client_endpoint) as client:
            out.append(client.generate(prompt, **params))
    return out[0], out[1]


def test_seeded_sampling_gives_the_same_stream(
    colocated: Fleet, split: Fleet, golden: list[GoldenCase]
) -> None:
    chosen = golden[:16]
    one = answers(colocated, chosen, 16, max_tokens=20, seed=7, **SAMPLED)
    other = answers(split, chosen, 5, max_tokens=20, seed=7, **SAMPLED)
    assert [c.token_ids for c in one] == [c.token_ids for c in other]
    assert len({c.token_ids[:6] for c in one}) > 8


def test_logprobs_of_every_token_and_of_the_prompt_survive_the_split(
    colocated: Fleet, split: Fleet
) -> None:
    """Scenario 77: the first token's logprobs come from the other process and may get lost."""
    one, other = both(
        colocated,
        split,
        "The three primary colours are red, yellow and",
        max_tokens=6,
        temperature=0.0,
        logprobs=3,
        prompt_logprobs=1,
    )
    assert one.token_ids == other.token_ids
    for a, b in ((one.logprobs, other.logprobs), (one.prompt_logprobs, other.prompt_logprobs)):
        assert a is not None
        assert b is not None
        assert [x.token for x in a] == [x.token for x in b]
        assert [x.logprob for x in a] == pytest.approx([x.logprob for x in b], abs=1e-3)
        assert [[t.token for t in x.top] for x in a] == [[t.token for t in x.top] for x in b]


def test_json_schema_holds_across_the_split(colocated: Fleet, split: Fleet) -> None:
    """Scenario 78: decode's matcher must have taken the token that prefill sampled."""
    prompt = "Give a city and its number of people as JSON: "
    one, other = both(
        colocated, split, prompt, max_tokens=60, temperature=0.0, response_format=SCHEMA
    )
    assert one.text == other.text
    assert one.finish_reason == "stop"
    answer = json.loads(one.text)
    assert set(answer) == {"city", "people"}


def test_stop_strings_penalties_and_limits_are_the_same(colocated: Fleet, split: Fleet) -> None:
    common = {"max_tokens": 24, "temperature": 0.0}
    for extra in (
        {"stop": ["three", "four"]},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
        {"logit_bias": {260: 3.0}, "min_tokens": 5},
        {"max_tokens": 1},
    ):
        one, other = both(colocated, split, "Count: one, two,", **(common | extra))  # type: ignore[arg-type]
        assert (one.text, one.token_ids, one.finish_reason) == (
            other.text,
            other.token_ids,
            other.finish_reason,
        ), extra
        assert one.usage.completion_tokens == other.usage.completion_tokens, extra


def test_usage_with_a_cached_prefix_is_the_same(colocated: Fleet, split: Fleet) -> None:
    """Scenario 79: cached_tokens are those of the prefill, not of the hand-over."""
    prompt = "usage " * 70
    both(colocated, split, prompt, max_tokens=2, temperature=0.0)
    one, other = both(colocated, split, prompt, max_tokens=2, temperature=0.0)
    assert one.usage == other.usage
    assert one.usage.cached_tokens >= 48
