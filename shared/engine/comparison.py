"""The last load-time check: logits over packed, chunked, paged KV against the model's own.

Whatever lets packed sequences see one another, loses a mask or computes scores differently shows
here, whichever runner it is in.
"""

from typing import Final

import torch

from shared.engine.attention import ATTENTION_NAME
from shared.engine.loading import HfModel
from shared.engine.probe import Logits, paged_logits, prompts
from shared.engine.runner import ModelRunner
from shared.errors import UnsupportedModel
from shared.kv.layout import KvDtype, KvLayout
from shared.precision import Precision

_TOLERANCE: Final[dict[Precision, float]] = {
    "fp32": 1e-3,
    "bf16": 0.15,
    "fp16": 0.05,
    "int8": 0.4,
    "int4": 0.6,
    "fp8": 0.4,
}
"""Relative error of the median row; a leak or a lost mask gives about 1 in most rows.
fp8 was off by 0.06 to 0.22 over nine families of tiny random models."""

_KV_TOLERANCE: Final[dict[KvDtype, float]] = {
    "fp32": 1e-3,
    "bf16": 0.15,
    "fp16": 0.05,
    "int8": 0.15,
    "fp8": 0.2,
}
"""The same for rounding KV. int8 was off by 0.003 to 0.026 over nine families of tiny random
models and SmolLM2-135M, bf16 by up to 0.018, fp8 by 0.017 to 0.081."""


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
                for prompt in prompts(model.get_input_embeddings().weight.shape[0])
            ]
    finally:
        model.set_attn_implementation(ATTENTION_NAME)


def difference(runner: ModelRunner, layout: KvLayout, expected: Logits, embeddings: int) -> float:
    """Return the relative error of the median row, of the worse prompt; NaN stays NaN.

    The runner's pools are replaced by small ones of the check's own.
    """
    errors = []
    ours = paged_logits(runner, layout, embeddings)
    for reference, found in zip(expected, ours, strict=True):
        distance = (found.float() - reference.float()).norm(dim=-1)
        errors.append((distance / reference.float().norm(dim=-1)).median())
    return float(torch.stack(errors).max())


def tolerance(precision: Precision, kv_dtype: KvDtype) -> float:
    """Return the error that rounding weights and KV to these explains."""
    return max(_TOLERANCE[precision], _KV_TOLERANCE[kv_dtype])


def require_equal(error: float, bound: float, name: str) -> None:
    """Raise ``UnsupportedModel`` unless the error is within the bound; NaN never is."""
    if not error <= bound:
        raise UnsupportedModel(
            f"{name}: packed and paged logits differ from the model's own "
            f"(relative error {error:.3g}, {bound:.3g} allowed)"
        )
