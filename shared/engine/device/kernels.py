"""What a device's kernels do."""

from typing import Protocol

import torch

from shared.engine.attention import Kernels
from shared.kernels.gpu.plan import Plan


class DeviceKernels(Kernels[Plan], Protocol):
    """Attention and KV writes, and activations to e4m3; ``shared.kernels.gpu.attention`` is one."""

    def quantise_rows(self, x: torch.Tensor, /) -> tuple[torch.Tensor, torch.Tensor]:
        """Return e4m3 [rows, n] and fp32 scales [rows, 1] of x [rows, n]."""
        ...
