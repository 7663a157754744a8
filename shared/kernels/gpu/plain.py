"""What the GPU's kernels compute, in plain torch on the CPU: to compare with, and for emulation."""

import torch

from shared.kernels import fallback, fp8
from shared.kernels.gpu.plan import Plan
from shared.kernels.types import AttentionBatch


class PlainKernels:
    """See ``shared.engine.device.kernels.DeviceKernels``."""

    def paged_attention(
        self,
        q: torch.Tensor,
        pools: tuple[torch.Tensor, torch.Tensor],
        plan: Plan,
        /,
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend q [rows, heads, k_dim]; returns [rows, heads, v_dim]."""
        batch = AttentionBatch(plan.tables.t().contiguous(), plan.query_start, plan.context)
        return fallback.paged_attention(
            q, pools, batch, scaling, window or 0, softcap or 0.0, sinks
        )

    def kv_write(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Store k, v [rows, kv_heads, dim] in their slots."""
        fallback.kv_write(k, v, k_pool, v_pool, slots.long())

    def quantise_rows(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return e4m3 [rows, n] and fp32 scales [rows, 1] of x [rows, n]."""
        return fp8.quantise_rows(x)
