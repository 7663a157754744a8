"""The last load-time check: logits over packed, chunked, paged KV against the model's own.

Whatever lets packed sequences see one another, loses a mask or computes scores differently shows
here, whichever runner it is in.
"""

from typing import Final

import numpy as np
import torch

from shared.config import Precision
from shared.engine.attention import ATTENTION_NAME
from shared.engine.batch import SequenceInput
from shared.engine.loading import HfModel
from shared.engine.pools import pools
from shared.engine.runner import ModelRunner
from shared.engine.step import IntArray, PackedStep
from shared.errors import UnsupportedModel
from shared.kv.layout import KvLayout

_LENGTHS: Final = (9, 6)
_TOLERANCE: Final[dict[Precision, float]] = {
    "fp32": 1e-3,
    "bf16": 0.15,
    "fp16": 0.05,
    "int8": 0.4,
}
"""Relative error of the median row; a leak or a lost mask gives about 1 in most rows."""

Logits = list[torch.Tensor]
"""Logits [tokens, vocabulary] of each test prompt."""


def own_logits(model: HfModel) -> Logits:
    """Return what the model computes by its own attention, one prompt at a time."""
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            return [
                model(
                    input_ids=torch.tensor([prompt]),
                    position_ids=torch.arange(len(prompt))[None],
                    use_cache=False,
                ).logits[0]
                for prompt in _prompts(model.get_input_embeddings().weight.shape[0])
            ]
    finally:
        model.set_attn_implementation(ATTENTION_NAME)


def difference(runner: ModelRunner, layout: KvLayout, expected: Logits, embeddings: int) -> float:
    """Return the relative error of the median row, of the worse prompt.

    The runner's pools are replaced by small ones of the check's own.
    """
    with torch.inference_mode():
        ours = _paged_logits(runner, layout, _prompts(embeddings))
    errors = []
    for reference, found in zip(expected, ours, strict=True):
        distance = (found.float() - reference.float()).norm(dim=-1)
        errors.append((distance / reference.float().norm(dim=-1)).median().item())
    return float(np.max(errors))


def tolerated(error: float, precision: Precision) -> bool:
    """Say whether rounding to this precision explains the error; never for NaN."""
    return error <= _TOLERANCE[precision]


def require_equal(error: float, precision: Precision, name: str) -> None:
    """Raise ``UnsupportedModel`` where rounding to this precision does not explain the error."""
    if not tolerated(error, precision):
        raise UnsupportedModel(
            f"{name}: packed and paged logits differ from the model's own "
            f"(relative error {error:.3g}, {_TOLERANCE[precision]:.3g} allowed)"
        )


def _prompts(vocabulary: int) -> list[tuple[int, ...]]:
    return [
        tuple((31 * i + 17 * which + 3) % vocabulary for i in range(count))
        for which, count in enumerate(_LENGTHS)
    ]


def _paged_logits(runner: ModelRunner, layout: KvLayout, prompts: list[tuple[int, ...]]) -> Logits:
    """Run two prompts in three steps: a chunk, a chunk beside a prompt, and two decodes."""
    tables = _attach_private_pool(runner, layout)
    a, b = _LENGTHS
    steps = [[(0, 0, a // 2)], [(0, a // 2, a - 1), (1, 0, b - 1)], [(0, a - 1, a), (1, b - 1, b)]]
    logits: list[list[torch.Tensor]] = [[], []]
    for parts in steps:
        sequences = [
            SequenceInput(
                key=which,
                tokens=prompts[which][low:high],
                start=low,
                block_table=(),
                sample=False,
            )
            for which, low, high in parts
        ]
        step = PackedStep(sequences, [tables[which] for which, _, _ in parts], layout.block_size)
        rows = runner.logits(step, torch.arange(int(step.rows[-1])))
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
