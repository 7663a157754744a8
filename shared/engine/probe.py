"""A short packed, chunked, paged run through a runner, by which two of them can be compared."""

from typing import Final

import numpy as np
import torch

from shared.engine.batch import SequenceInput
from shared.engine.pools import pools
from shared.engine.runner import ModelRunner
from shared.engine.step import IntArray, PackedStep
from shared.kv.layout import KvLayout

_LENGTHS: Final = (9, 6)

Logits = list[torch.Tensor]
"""Logits [tokens, vocabulary] of each test prompt."""


def prompts(embeddings: int) -> list[tuple[int, ...]]:
    """Return the test prompts for a model that knows ``embeddings`` token ids."""
    return [
        tuple((31 * i + 17 * which + 3) % embeddings for i in range(count))
        for which, count in enumerate(_LENGTHS)
    ]


def paged_logits(runner: ModelRunner, layout: KvLayout, embeddings: int) -> Logits:
    """Run both prompts in three steps: a chunk, a chunk beside a prompt, and two decodes.

    The runner's pools are replaced by small ones; attach others afterwards.
    """
    tables = _attach_private_pool(runner, layout)
    tokens = prompts(embeddings)
    a, b = _LENGTHS
    steps = [[(0, 0, a // 2)], [(0, a // 2, a - 1), (1, 0, b - 1)], [(0, a - 1, a), (1, b - 1, b)]]
    logits: list[list[torch.Tensor]] = [[], []]
    for parts in steps:
        sequences = [
            SequenceInput(
                key=which,
                tokens=tokens[which][low:high],
                start=low,
                block_table=(),
                sample=False,
            )
            for which, low, high in parts
        ]
        step = PackedStep(sequences, [tables[which] for which, _, _ in parts], layout.block_size)
        with torch.inference_mode():
            rows = runner.logits(step, torch.arange(int(step.rows[-1]))).values
        for index, (which, _, _) in enumerate(parts):
            logits[which].append(rows[step.rows[index] : step.rows[index + 1]])
    return [torch.cat(parts) for parts in logits]


def _attach_private_pool(runner: ModelRunner, layout: KvLayout) -> list[IntArray]:
    """Attach pools of just enough blocks; return interleaved block tables, last block first."""
    count = len(_LENGTHS) * max(-(-n // layout.block_size) for n in _LENGTHS)
    runner.attach(*pools(layout, count))
    return [
        np.arange(count - 1 - which, -1, -len(_LENGTHS), dtype=np.int64)
        for which in range(len(_LENGTHS))
    ]
