"""Names of number formats in torch's terms."""

from typing import Final

import torch

from shared.kernels.types import LinearKind
from shared.precision import Precision

LOADED_AS: Final[dict[Precision, torch.dtype]] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.bfloat16,
    "int4": torch.bfloat16,
    "fp8": torch.bfloat16,
}
"""What weights are read as; int8, int4 and fp8 ones are quantised from there."""

KINDS: Final[dict[Precision, LinearKind]] = {
    "fp32": "fp32",
    "bf16": "bf16",
    "int8": "int8",
    "int4": "int4",
}
"""Precisions in which our own linear layers compute."""
