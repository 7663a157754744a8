"""The engine: one model, one KV pool, and steps over packed sequences."""

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from shared.device.device import KvMemory
from shared.device.names import device_problem
from shared.engine.batch import Sampled, SequenceInput, StepInput, StepResult
from shared.engine.pools import pools
from shared.engine.prepared import LoadRequest, Prepared
from shared.engine.prompt_logprobs import PromptRows
from shared.engine.recipe import recall
from shared.engine.runner import Logits
from shared.engine.sampling.grammar import GrammarCompiler
from shared.engine.sampling.sampler import Failure, Sampler
from shared.engine.step import OnLayer, PackedStep
from shared.errors import BadConfig, DiptychError, ErrorPayload
from shared.kv.layout import KvDtype, KvLayout
from shared.kv.memory import give_back_freed
from shared.precision import Precision, kv_dtype_for


class Engine:
    """A loaded and checked model. Use from one thread only.

    ``layout`` is the KV layout the arena must have, ``vocab_size`` the width of the logits,
    ``eos_token_ids`` the model's end tokens. ``model_seconds``: time spent in the model so far;
    the rest of a step is packing and sampling.
    """

    layout: KvLayout
    model_id: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    model_seconds: float

    def __init__(self, prepared: Prepared, model_dir: Path, threads: int) -> None:
        facts = prepared.facts
        self.layout = facts.layout
        self.model_id = prepared.model_id
        self.vocab_size = facts.vocab_size
        self.max_model_len = facts.max_model_len
        self.eos_token_ids = facts.eos_token_ids
        self._runner = prepared.runner
        self._embeddings = facts.embeddings
        grammars = GrammarCompiler(model_dir, self.vocab_size, self.eos_token_ids, threads)
        self._sampler = Sampler(self.vocab_size, grammars)
        self._num_blocks = 0
        self.model_seconds = 0.0

    @classmethod
    def load(
        cls,
        model_dir: Path,
        *,
        precision: Precision,
        kv_dtype: KvDtype | None = None,
        block_size: int,
        max_model_len: int | None,
        threads: int,
    ) -> "Engine":
        """Load a safetensors directory (see ``resolve_model``) and run all load-time checks.

        ``kv_dtype`` None takes what suits ``precision``; ``threads`` sets torch's thread count
        for the process.

        Raises:
            ResourceMissing: files are missing or truncated, or memory is too small.
            UnsupportedModel: a check failed; the sentence says which.
            BadConfig: ``max_model_len`` is more than the model has positions, or a format is none
                of a CPU's.
        """
        torch.set_num_threads(threads)
        dtype = kv_dtype_for(precision, kv_dtype)
        problem = device_problem("cpu", precision, dtype)
        if problem is not None:
            raise BadConfig(problem)
        request = LoadRequest(model_dir, precision, dtype, block_size, max_model_len)
        prepared = recall(request)
        if prepared is None:
            # Here and not above: three seconds of imports that a known model does without.
            from shared.engine.prepare import prepare

            prepared = prepare(request)
        give_back_freed()
        return cls(prepared, model_dir, threads)

    def attach(self, arena: KvMemory) -> None:
        """Use ``arena`` as the KV pool; its layout must be this engine's.

        Raises:
            ValueError: another layout, or a read-only arena.
        """
        if arena.layout != self.layout or arena.read_only:
            raise ValueError("the arena is read-only or of another layout than the engine's")
        layers = range(len(self.layout.layers))
        self._runner.attach([arena.k(i) for i in layers], [arena.v(i) for i in layers])
        self._num_blocks = arena.num_blocks

    def detach(self) -> None:
        """Let go of the arena's memory; a step is an error until another is attached."""
        self._num_blocks = 0
        self._runner.attach(*pools(self.layout, 0))

    def step(self, batch: StepInput, on_layer: OnLayer | None = None) -> StepResult:
        """Run all sequences of ``batch`` through the model once and sample where asked.

        ``on_layer(i)`` is called as soon as the KV of this step is written for layer ``i``,
        for every layer, in ascending order. A sequence that cannot be run or sampled fails
        alone.

        Raises:
            ValueError: no arena is attached.
        """
        if not self._num_blocks:
            raise ValueError("attach an arena before the first step")
        self._sampler.close(batch.closed)
        failed: list[Failure] = []
        for sequence in batch.opened:
            try:
                self._sampler.open(sequence)
            except DiptychError as error:
                failed.append((sequence.key, error.payload()))
        runnable = self._admit(batch.sequences, failed)
        if not runnable:
            return StepResult(failed=tuple(failed))
        with torch.inference_mode():
            return self._run(runnable, failed, on_layer)

    def _admit(
        self, sequences: Sequence[SequenceInput], failed: list[Failure]
    ) -> list[SequenceInput]:
        refused = {key for key, _ in failed}
        runnable: list[SequenceInput] = []
        seen: set[int] = set()
        for sequence in sequences:
            if sequence.key in refused:
                continue
            problem = self._problem(sequence)
            if sequence.key in seen:
                problem = "a sequence twice in one step"
            seen.add(sequence.key)
            if problem is None:
                runnable.append(sequence)
            else:
                self._sampler.close((sequence.key,))
                failed.append(
                    (
                        sequence.key,
                        ErrorPayload(code="internal", message=f"engine input: {problem}"),
                    )
                )
        return runnable

    def _problem(self, sequence: SequenceInput) -> str | None:
        """Say what would make this sequence read or write outside its own blocks."""
        if not sequence.tokens or sequence.start < 0:
            return "no tokens, or a negative position"
        end = sequence.start + len(sequence.tokens)
        if end > self.max_model_len:
            return f"position {end - 1} is past max_model_len {self.max_model_len}"
        blocks = sequence.block_table
        if len(blocks) * self.layout.block_size < end:
            return f"{len(blocks)} blocks do not cover {end} tokens"
        if not 0 <= min(blocks) <= max(blocks) < self._num_blocks:
            return f"a block outside the pool of {self._num_blocks}"
        if not 0 <= min(sequence.tokens) <= max(sequence.tokens) < self._embeddings:
            return f"a token outside the vocabulary of {self._embeddings}"
        if sequence.sample and self._sampler.get(sequence.key) is None:
            return "sampling asked for a sequence that is not open"
        return None

    def _run(
        self,
        sequences: list[SequenceInput],
        failed: list[Failure],
        on_layer: OnLayer | None,
    ) -> StepResult:
        step = PackedStep(sequences, [s.block_table for s in sequences], self.layout.block_size)
        first = step.rows.tolist()
        asked = [i for i, s in enumerate(sequences) if s.sample]
        last_rows = [first[i + 1] - 1 for i in asked]
        prompts = [
            found
            for i, s in enumerate(sequences)
            if (found := PromptRows.of(s, self._sampler.get(s.key), first[i])) is not None
        ]
        keep = last_rows + [row for prompt in prompts for row in prompt.rows]
        rows = torch.from_numpy(np.array(keep, np.int64))
        started = time.perf_counter()
        logits = self._runner.logits(step, rows, on_layer)
        self.model_seconds += time.perf_counter() - started
        prompt_logprobs = []
        offset = len(asked)
        for prompt in prompts:
            part = logits.values[offset : offset + len(prompt.rows)]
            offset += len(prompt.rows)
            try:
                prompt_logprobs.append((prompt.key, prompt.logprobs(part)))
            except DiptychError as error:
                failed.append((prompt.key, error.payload()))
                self._sampler.close((prompt.key,))
        sampled = self._sample(sequences, asked, logits, failed)
        return StepResult(
            sampled=tuple(sampled), failed=tuple(failed), prompt_logprobs=tuple(prompt_logprobs)
        )

    def _sample(
        self,
        sequences: list[SequenceInput],
        asked: list[int],
        logits: Logits,
        failed: list[Failure],
    ) -> list[Sampled]:
        rows = [r for r, i in enumerate(asked) if self._sampler.get(sequences[i].key) is not None]
        values = logits.values if len(rows) == len(logits.values) else logits.values[rows]
        best = None if logits.best is None else logits.best.tolist()
        sampled, broken = self._sampler.sample(
            [sequences[asked[r]].key for r in rows],
            values.float().numpy(),
            None if best is None else [best[r] for r in rows],
        )
        failed += broken
        return sampled
