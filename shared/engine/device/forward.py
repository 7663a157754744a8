"""Attention of one forward pass on a device, called by transformers' layers."""

from collections.abc import Callable
from typing import Protocol

import torch

from shared.engine.attention import LayerPool, Scores
from shared.engine.device.buffers import StepTensors
from shared.kernels.gpu.plan import Plan


class Kernels(Protocol):
    """Attention and KV writes over a pool; ``shared.kernels.gpu.attention`` has them."""

    def paged_attention(
        self,
        q: torch.Tensor,
        pools: tuple[torch.Tensor, torch.Tensor],
        plan: Plan,
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend q [rows, heads, k_dim]; returns [rows, heads, v_dim]."""
        ...

    def kv_write(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Store k, v [rows, kv_heads, dim] in their slots."""
        ...


class DeviceForward:
    """See ``shared.engine.attention.Forward``; ``written(layer)`` is called for each layer."""

    def __init__(
        self,
        kernels: Kernels,
        step: StepTensors,
        pools: list[LayerPool],
        written: Callable[[int], None] | None,
    ) -> None:
        self._kernels = kernels
        self._step = step
        self._pools = pools
        self._written = written

    def run(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scores: Scores,
        window: int | None,
    ) -> torch.Tensor:
        """Write this layer's KV, note it, attend. Returns [1, rows, heads, v_dim]."""
        pool = self._pools[layer]
        if pool.writes:
            self._kernels.kv_write(_rows(key), _rows(value), pool.k, pool.v, self._step.slots)
        if self._written is not None:
            self._written(layer)
        out = self._kernels.paged_attention(
            _rows(query),
            (pool.k, pool.v),
            self._step.plan,
            scaling=scores.scaling,
            window=window,
            softcap=scores.softcap,
            sinks=None if scores.sinks is None else scores.sinks.float().contiguous(),
        )
        return out[None]


def _rows(heads: torch.Tensor) -> torch.Tensor:
    rows = heads[0].transpose(0, 1)
    return rows if rows.stride(2) == 1 else rows.contiguous()
