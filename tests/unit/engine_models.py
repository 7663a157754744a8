"""Tiny random models on disk, and a driver that runs an engine over shuffled blocks."""

import random
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import tqdm
import transformers
from transformers import AutoModelForCausalLM

from shared.engine.batch import OpenSequence, Sampled, SequenceInput, StepInput, StepResult
from shared.engine.engine import Engine
from shared.kv.arena import KvArena
from shared.messages.request import Sampling, TokenLogprob

# tqdm makes a semaphore with its first bar and keeps it for the life of the process.
tqdm.tqdm.get_lock()

VOCAB = 96
WINDOW = 7
BLOCK = 4
POSITIONS = 128

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**_COMMON),
    "qwen3": lambda: transformers.Qwen3Config(**_COMMON),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **_COMMON, sliding_window=WINDOW, layer_types=_MIXED
    ),
    "mistral": lambda: transformers.MistralConfig(**_COMMON, sliding_window=WINDOW),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **_COMMON,
        **_EXPERTS,
        sliding_window=WINDOW,
        layer_types=_MIXED,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    ),
    "mixtral": lambda: transformers.MixtralConfig(**_COMMON, **_EXPERTS),
    "gemma2": lambda: transformers.Gemma2Config(
        **_COMMON, sliding_window=WINDOW, layer_types=_MIXED
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **{**_COMMON, "num_key_value_heads": 4, "head_dim": 4},
        moe_intermediate_size=16,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=1,
    ),
    "gemma4": lambda: transformers.Gemma4TextConfig(
        **{**_COMMON, "num_hidden_layers": 4},
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=8,
        global_head_dim=16,
    ),
}
SERVED = (
    "llama",
    "qwen3",
    "gemma3",
    "mistral",
    "gpt_oss",
    "mixtral",
    "gemma2",
    "deepseek_v3",
    "gemma4",
)


def save_model(directory: Path, config: Any) -> Path:
    """Write a random model of ``config``; its embeddings and norms are random as well."""
    torch.manual_seed(11)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(directory)
    return directory


def reference(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Load the stock model with transformers' own eager attention."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(
            directory, attn_implementation="eager", dtype=dtype
        )
    return model.eval()


def load_engine(directory: Path, **options: Any) -> Engine:
    """Load an engine with this file's defaults."""
    defaults: dict[str, Any] = {
        "precision": "fp32",
        "block_size": BLOCK,
        "max_model_len": None,
        "threads": 1,
    }
    return Engine.load(directory, **{**defaults, **options})


def prompt(seed: int, length: int, vocab: int = VOCAB) -> tuple[int, ...]:
    """Return ``length`` random token ids."""
    source = random.Random(f"{seed}-{length}")
    return tuple(source.randrange(3, vocab) for _ in range(length))


def greedy(**options: Any) -> Sampling:
    """Return greedy sampling parameters."""
    return Sampling(**{"seed": 0, "max_tokens": 1000, "temperature": 0.0, **options})


class Driver:
    """Runs sequences through an engine step by step, on blocks in random order."""

    def __init__(self, engine: Engine, num_blocks: int = 128, seed: int = 3) -> None:
        self.engine = engine
        self.arena = KvArena.create(engine.layout, num_blocks)
        engine.attach(self.arena)
        for layer in range(len(engine.layout.layers)):
            # What was never written must not matter, whatever it is.
            for part in self.arena.raw(layer):
                part.fill(0xFF)  # NaN in every dtype, and as the scale of an int8 row
        self._free = list(range(num_blocks))
        random.Random(seed).shuffle(self._free)
        self._tables: dict[int, list[int]] = {}
        self._opened: list[OpenSequence] = []
        self._closed: list[int] = []
        self.tokens: dict[int, list[int]] = {}
        self.output: dict[int, list[Sampled]] = {}
        self.prompt_logprobs: dict[int, list[TokenLogprob]] = {}
        self.failed: dict[int, str] = {}

    def open(
        self,
        key: int,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        output_ids: Sequence[int] = (),
    ) -> None:
        """Queue the opening of a sequence for the next step."""
        self._opened.append(OpenSequence(key, sampling, tuple(prompt_ids), tuple(output_ids)))
        self.tokens[key] = [*prompt_ids, *output_ids]
        self._tables[key] = []
        self.output[key] = []

    def close(self, key: int) -> None:
        """Queue the closing of a sequence; its blocks are free for others at once."""
        self._closed.append(key)
        self._free.extend(self._tables.pop(key))

    def part(self, key: int, start: int, end: int, *, sample: bool) -> SequenceInput:
        """Return tokens [start, end) of a sequence as input, with blocks for them."""
        table = self._tables[key]
        while len(table) * self.engine.layout.block_size < end:
            table.append(self._free.pop())
        return SequenceInput(key, tuple(self.tokens[key][start:end]), start, tuple(table), sample)

    def step(
        self, parts: Iterable[SequenceInput], on_layer: Callable[[int], None] | None = None
    ) -> StepResult:
        """Run one step and note what came of it."""
        batch = StepInput(tuple(self._opened), tuple(self._closed), tuple(parts))
        self._opened, self._closed = [], []
        result = self.engine.step(batch, on_layer)
        for sampled in result.sampled:
            self.tokens[sampled.key].append(sampled.token)
            self.output[sampled.key].append(sampled)
        for key, entries in result.prompt_logprobs:
            self.prompt_logprobs.setdefault(key, []).extend(entries)
        self.failed.update({key: error.message for key, error in result.failed})
        return result

    def prefill(self, key: int, chunk: int = 10_000) -> None:
        """Run all tokens of a sequence, alone, in chunks; sample after the last."""
        total = len(self.tokens[key])
        for low in range(0, total, chunk):
            high = min(low + chunk, total)
            self.step([self.part(key, low, high, sample=high == total)])

    def decode(self, keys: Iterable[int], steps: int) -> None:
        """Run ``steps`` decode steps of all ``keys`` in one batch."""
        keys = list(keys)
        for _ in range(steps):
            ends = {key: len(self.tokens[key]) for key in keys}
            self.step([self.part(k, ends[k] - 1, ends[k], sample=True) for k in keys])

    def reserve(self, block: int) -> None:
        """Keep a free block from all sequences."""
        self._free.remove(block)

    def ids(self, key: int) -> list[int]:
        """Return the tokens sampled for a sequence."""
        return [sampled.token for sampled in self.output[key]]

    def finish(self) -> None:
        """Give the arena back."""
        self.engine.detach()
        self.arena.close()


def logprobs_of(entry: TokenLogprob, vocab: int = VOCAB) -> torch.Tensor:
    """Return the row of log probabilities from an entry that lists the whole vocabulary."""
    row = torch.full((vocab,), float("nan"), dtype=torch.float64)
    for token, value in entry.top:
        row[token] = value
    return row
