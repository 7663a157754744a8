"""Attention of prompts by FlashInfer where it is installed and fits; all else by our kernels.

FlashInfer's tiles are tuned for each generation of GPUs, and a prompt is where that pays. Decodes
stay with ours: their sums do not depend on the batch, and they need no planning between graphs.
"""

from typing import Any, Final, TypeAlias

import numpy as np
import torch

from shared.kernels.gpu.form import Form, form_of
from shared.kernels.gpu.plan import Plan
from shared.kernels.types import AttentionBatch

FlashInfer: TypeAlias = Any
"""The module ``flashinfer`` (0.6 or newer); it is not typed, and tests hand in another."""

Own: TypeAlias = Any
"""The module ``shared.kernels.gpu.attention``, or what has its functions."""

_WORKSPACE: Final = 128 << 20
_DIMS: Final = (64, 128, 256)
_DTYPES: Final = (torch.float16, torch.bfloat16)


class FlashInferKernels:
    """See ``shared.engine.attention.Kernels``. Use from one thread only."""

    def __init__(self, flashinfer: FlashInfer, own: Own, place: torch.device) -> None:
        self._flashinfer = flashinfer
        self._own = own
        self._place = place
        self._workspace: torch.Tensor | None = None
        self._wrappers: dict[tuple[Form, torch.dtype], Any] = {}
        self._planned: set[tuple[Form, torch.dtype]] = set()
        self._plan: Plan | None = None
        self.kv_write = own.kv_write
        self.quantise_rows = own.quantise_rows

    def paged_attention(
        self,
        q: torch.Tensor,
        pools: tuple[torch.Tensor, torch.Tensor],
        plan: Plan,
        *,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend as ``shared.kernels.gpu.attention.paged_attention``."""
        form = form_of(q, pools, window or 0, softcap or 0.0, sinks is not None, scaling)
        if not _fits(form, q, plan):
            out: torch.Tensor = self._own.paged_attention(
                q, pools, plan, scaling=scaling, window=window, softcap=softcap, sinks=sinks
            )
            return out
        wrapper = self._prepared(plan, form, q.dtype)
        result: torch.Tensor = wrapper.run(q.contiguous(), pools)
        return result

    def _prepared(self, plan: Plan, form: Form, dtype: torch.dtype) -> Any:  # noqa: ANN401
        """Return the wrapper for this kind of layer, planned once per step."""
        if plan is not self._plan:
            self._plan = plan
            self._planned.clear()
        key = (form, dtype)
        wrapper = self._wrappers.get(key)
        if wrapper is None:
            if self._workspace is None:
                self._workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=self._place)
            wrapper = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
            self._wrappers[key] = wrapper
        if key not in self._planned:
            assert plan.host is not None
            indptr, indices, last = pages_of(plan.host, form.block_size)
            wrapper.plan(
                plan.host.query_start,
                indptr,
                indices.to(self._place, non_blocking=True),
                last,
                form.heads,
                form.kv_heads,
                form.k_dim,
                form.block_size,
                causal=True,
                sm_scale=form.scale,
                logits_soft_cap=form.softcap or None,
                q_data_type=dtype,
                kv_data_type=dtype,
                # Splits depend on the whole batch, and a sequence's rounding would with them.
                disable_split_kv=True,
            )
            self._planned.add(key)
        return wrapper


def pages_of(
    batch: AttentionBatch, block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return FlashInfer's page table of a CPU batch, int32 on the CPU.

    Where each sequence's pages begin [sequences + 1], all pages, and the tokens in the last page
    of each sequence [sequences].
    """
    tables, context = batch.tables.numpy(), batch.context.numpy()
    used = -(-context // block_size)
    indptr = np.concatenate(([0], np.cumsum(used))).astype(np.int32)
    indices = tables[np.arange(tables.shape[1])[None] < used[:, None]]
    last = ((context - 1) % block_size + 1).astype(np.int32)
    return torch.from_numpy(indptr), torch.from_numpy(indices), torch.from_numpy(last)


def _fits(form: Form, q: torch.Tensor, plan: Plan) -> bool:
    """Say whether FlashInfer takes this layer and step.

    Windows stay with our kernels, which never read a block below one: it may be another
    sequence's by now, and its NaN would spread.
    """
    return (
        plan.host is not None
        and not plan.decodes.shape[0]
        and form.k_dim == form.v_dim
        and form.k_dim in _DIMS
        and not (form.window or form.sinks or form.exact or form.scaled)
        and q.dtype in _DTYPES
    )
