"""KV dtypes in torch's terms."""

from typing import Final

import torch

from shared.kv.layout import KvDtype

TORCH_DTYPES: Final[dict[KvDtype, torch.dtype]] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}
"""Of a pool's tensors; int8 and fp8 rows end with the bytes of their fp32 scale."""
