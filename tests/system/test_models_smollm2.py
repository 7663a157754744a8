"""The engine on the real default model: conversion, and greedy equality with transformers."""

import json
import shutil
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import tqdm
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from shared.engine.batch import OpenSequence, SequenceInput, StepInput
from shared.engine.engine import Engine
from shared.engine.model_files import resolve_model
from shared.errors import ResourceMissing
from shared.known_models import KNOWN_MODELS, known_model_file
from shared.kv.arena import KvArena
from shared.messages.request import Grammar, Sampling

# tqdm makes a semaphore with its first bar and keeps it for the life of the process.
tqdm.tqdm.get_lock()

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

KNOWN = KNOWN_MODELS["smollm2-135m-instruct"]
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "<|im_start|>user\nName three kinds of tea.<|im_end|>\n<|im_start|>assistant\n",
)
NEW_TOKENS = 24
BLOCK = 16


@pytest.fixture(scope="module")
def directory() -> Path:
    if not known_model_file(KNOWN).is_file():
        pytest.skip(f"run `diptych fetch {KNOWN.name}` first")
    return resolve_model(KNOWN.name)


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Any:
    return AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[Engine]:
    engine = Engine.load(
        directory, precision="fp32", block_size=BLOCK, max_model_len=1024, threads=1
    )
    arena = KvArena.create(engine.layout, 128)
    engine.attach(arena)
    yield engine
    engine.detach()
    arena.close()


def sequence(key: int, tokens: list[int], start: int, end: int) -> SequenceInput:
    table = tuple(key * 16 + i for i in range(-(-end // BLOCK)))
    return SequenceInput(key, tuple(tokens[start:end]), start, table, end == len(tokens))


def test_greedy_equals_generate_token_for_token(
    engine: Engine, directory: Path, tokenizer: Any
) -> None:
    """The reference is stock transformers in fp32; prompts run packed, the longest in chunks."""
    stock = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    expected = []
    for ids in prompts:
        with torch.inference_mode():
            output = stock.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        expected.append(output[0, len(ids) :].tolist())
    tokens = [list(ids) for ids in prompts]
    sampling = Sampling(seed=0, max_tokens=NEW_TOKENS, temperature=0.0)
    opened = tuple(OpenSequence(k, sampling, tuple(ids)) for k, ids in enumerate(prompts))
    computed = [0, 0, 0]
    first = True
    while any(len(t) < len(p) + NEW_TOKENS for t, p in zip(tokens, prompts, strict=True)):
        parts = []
        for key, known in enumerate(tokens):
            end = min(len(known), computed[key] + 7)
            if len(known) < len(prompts[key]) + NEW_TOKENS:
                parts.append(sequence(key, known, computed[key], end))
                computed[key] = end
        result = engine.step(StepInput(opened if first else (), (), tuple(parts)))
        first = False
        assert result.failed == ()
        for sampled in result.sampled:
            tokens[sampled.key].append(sampled.token)
    engine.step(StepInput(closed=(0, 1, 2)))
    for ids, known, want in zip(prompts, tokens, expected, strict=True):
        assert known[len(ids) :] == want


def test_constrained_output_is_json(engine: Engine, tokenizer: Any) -> None:
    """The real tokenizer's pieces straddle JSON's tokens."""
    schema = {
        "type": "object",
        "properties": {"tea": {"type": "string", "maxLength": 12}},
        "required": ["tea"],
    }
    sampling = Sampling(
        seed=5,
        max_tokens=60,
        stop_token_ids=engine.eos_token_ids,
        grammar=Grammar(kind="json_schema", schema=json.dumps(schema)),
    )
    ids = tokenizer.encode(PROMPTS[2])
    tokens = list(ids)
    opened: tuple[OpenSequence, ...] = (OpenSequence(3, sampling, tuple(ids)),)
    start = 0
    while tokens[-1] not in engine.eos_token_ids or len(tokens) == len(ids):
        result = engine.step(StepInput(opened, (), (sequence(3, tokens, start, len(tokens)),)))
        assert result.failed == ()
        opened, start = (), len(tokens)
        tokens.append(result.sampled[0].token)
        assert len(tokens) < len(ids) + 60
    engine.step(StepInput(closed=(3,)))
    assert set(json.loads(tokenizer.decode(tokens[len(ids) : -1]))) == {"tea"}


def test_conversion_equals_what_transformers_reads_from_gguf(
    directory: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every later equality rests on the converted weights, config and tokenizer.

    transformers reads the file's header three times and derives the same names for every module:
    once each is enough, and two thirds of its time.
    """
    for name in ("GGUFReader", "get_tensor_name_map"):
        monkeypatch.setattr(gguf, name, cache(getattr(gguf, name)))
    file = known_model_file(KNOWN)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32
        )
    converted = load_file(directory / "model.safetensors")
    names = dict(model.named_parameters())  # tied weights count once
    assert set(converted) == set(names)
    for name, parameter in names.items():
        assert torch.equal(converted[name], parameter), name
    stock = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    for text in (*PROMPTS, "Grüße, 世界! 🫖\n\t x", " leading", "1234567"):
        assert tokenizer.encode(text) == stock.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.chat_template


@pytest.mark.parametrize("size", [40_000_000, 1_000_000, 100])
def test_truncated_file_is_refused(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Cut in the weights, in the metadata, and in the header."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "cut.gguf"
    with known_model_file_of(directory).open("rb") as source, file.open("wb") as target:
        target.write(source.read(size))
    with pytest.raises(ResourceMissing, match="truncated"):
        resolve_model(str(file))
    shutil.rmtree(tmp_path / "cache")


def known_model_file_of(directory: Path) -> Path:
    """The fetched file, found from the converted folder: the cache's place is changed by now."""
    return directory.parent.parent / "models" / KNOWN.name / Path(KNOWN.member).name
