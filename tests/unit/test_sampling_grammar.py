"""Constrained output is valid, whatever the logits say, and resumes where it stood."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from shared.engine.batch import OpenSequence
from shared.engine.sampling.grammar import GrammarCompiler, GrammarMismatch
from shared.engine.sampling.sampler import Sampler
from shared.errors import InvalidRequest
from shared.messages.request import Grammar, Sampling

PIECES = ["true", "null", '":', '{"', '"}', "12", "name"]
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["name", "age"],
    }
)
OBJECT = Grammar(kind="json_object")
PERSON = Grammar(kind="json_schema", schema=SCHEMA)


class Model:
    """A byte-level tokenizer with a few long pieces and an end token, and its compiler."""

    def __init__(self, directory: Path) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocab = {piece: i for i, piece in enumerate(["</s>", *alphabet, *PIECES])}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
        self.tokenizer.save_pretrained(directory)
        self.end = vocab["</s>"]
        self.size = len(vocab) + 9  # logits are often wider than the vocabulary
        self.compiler = GrammarCompiler(directory, self.size, (self.end,), 1)

    def sampler(self, grammar: Grammar, output: tuple[int, ...] = (), **options: Any) -> Sampler:
        sampler = Sampler(self.size, self.compiler)
        sampling = Sampling(
            **{"seed": 3, "max_tokens": 400, "stop_token_ids": (self.end,), **options},
            grammar=grammar,
        )
        sampler.open(OpenSequence(0, sampling, (), output))
        return sampler

    def row(self, step: int, seed: int = 0) -> Any:
        """Random logits that prefer closing characters, so that the output ends some day."""
        row = np.random.default_rng((seed, step)).normal(0, 1, (1, self.size))
        row = row.astype(np.float32)
        for character in '"}]':
            row[0, self.tokenizer.convert_tokens_to_ids(character)] += 4
        row[0, self.end] += 3
        return row

    def run(self, sampler: Sampler, seed: int, output: list[int], limit: int = 400) -> list[int]:
        while len(output) < limit and output[-1:] != [self.end]:
            sampled, failed = sampler.sample([0], self.row(len(output), seed))
            assert failed == []
            output.append(sampled[0].token)
        return output


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> Model:
    return Model(tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_output_is_valid(model: Model, seed: int, temperature: float) -> None:
    """Random logits are the hardest case: every token is up to the mask."""
    for grammar in (OBJECT, PERSON):
        tokens = model.run(model.sampler(grammar, temperature=temperature), seed, [])
        assert tokens[-1] == model.end
        value = json.loads(model.tokenizer.decode(tokens[:-1]))
        assert isinstance(value, dict)
        if grammar is PERSON:
            assert set(value) == {"name", "age"}
            assert 0 <= value["age"] <= 99


def test_resumed_output_is_the_same(model: Model) -> None:
    """The matcher must be brought to where the sequence stood."""
    whole = model.run(model.sampler(PERSON), 1, [])
    assert len(whole) > 6
    for cut in (1, 5, len(whole) - 1):
        part = whole[:cut]
        assert model.run(model.sampler(PERSON, tuple(part)), 1, list(part)) == whole


def test_end_token_waits_for_the_grammar(model: Model) -> None:
    """An early end token is the commonest way to invalid JSON."""
    sampler = model.sampler(OBJECT)
    row = model.row(0)
    row[0, model.end] = 1000.0
    assert sampler.sample([0], row)[0][0].token != model.end


def test_grammar_wins_over_min_tokens(model: Model) -> None:
    """Where only an end token is left, forbidding it would leave nothing."""
    done = tuple(model.tokenizer.encode("{}", add_special_tokens=False))
    sampler = model.sampler(OBJECT, done, min_tokens=100)
    assert sampler.sample([0], model.row(2))[0][0].token == model.end


def test_only_end_tokens_follow_an_end_token(model: Model) -> None:
    """With ignore_eos the sequence goes on; its text must stay valid JSON."""
    done = (*model.tokenizer.encode("{}", add_special_tokens=False), model.end)
    sampler = model.sampler(OBJECT, done, stop_token_ids=())
    for step in range(3):
        assert sampler.sample([0], model.row(step))[0][0].token == model.end


def test_output_that_does_not_fit_its_grammar_is_refused(model: Model) -> None:
    """A resume with another request's tokens is a bug upstream, not a client error."""
    with pytest.raises(GrammarMismatch, match="does not follow the grammar") as refused:
        model.sampler(OBJECT, (model.tokenizer.convert_tokens_to_ids("x"),))
    assert refused.value.code == "internal"


def test_a_schema_that_nothing_satisfies_is_the_clients_error(model: Model) -> None:
    """It compiles, but leads nowhere: this was an internal error."""
    endless = Grammar(kind="json_schema", schema='{"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}')
    _, failed = model.sampler(endless).sample([0], model.row(0))
    (error,) = [error for _, error in failed]
    assert (error.code, error.param) == ("invalid_request", "response_format")


@pytest.mark.parametrize("schema", ["{", "[]", '{"type": "nope"}', '{"$ref": "#/missing"}', ""])
def test_unusable_schema_names_the_field(model: Model, schema: str) -> None:
    """The client must learn what to change, not where xgrammar's source fails."""
    with pytest.raises(InvalidRequest) as refused:
        model.sampler(Grammar(kind="json_schema", schema=schema))
    assert refused.value.param == "response_format"
    assert ".cc:" not in refused.value.message


def test_model_without_tokenizer_says_so(tmp_path: Path) -> None:
    """Text is needed to know which tokens fit."""
    compiler = GrammarCompiler(tmp_path, 10, (0,), 1)
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        compiler.matcher(OBJECT, ())


def test_whitespace_ends(model: Model) -> None:
    """A model that prefers blanks would fill its whole budget with them."""
    sampler = model.sampler(OBJECT, tuple(model.tokenizer.encode("{", add_special_tokens=False)))
    blank = model.tokenizer.convert_tokens_to_ids("Ġ")
    tokens = []
    for _ in range(40):
        row = np.zeros((1, model.size), dtype=np.float32)
        row[0, blank] = 50.0
        tokens.append(sampler.sample([0], row)[0][0].token)
    assert tokens.count(blank) < 40
