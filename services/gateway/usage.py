"""Adds up the tokens of a call."""

from services.gateway.answers import PromptTokensDetails, Usage
from services.gateway.call import Call


def usage_of(call: Call) -> Usage:
    """Return the usage of an ended call; a prompt that runs ``n`` times counts once."""
    firsts = call.choices[:: call.plan.n]
    prompt = sum(len(choice.prompt_ids) for choice in firsts)
    cached = sum(choice.end.num_cached_tokens for choice in firsts if choice.end is not None)
    output = sum(choice.num_tokens for choice in call.choices)
    return Usage(prompt, output, prompt + output, PromptTokensDetails(cached))
