"""Compile our Triton kernels for GPUs that need not be here; run by ``test_triton_kernels``.

Prints one JSON object per kernel and shape: name, compute capability, bytes of shared memory.
``python -m tests.unit.triton_compiled all`` takes minutes, for more GPUs and shapes.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from shared.kernels.gpu import attention
from shared.kernels.gpu.plan import plan_of
from tests.unit.kernel_reference import make_case


class Absent:
    """Stands in for the driver of a GPU: it names the target, and nothing is ever launched."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability  # triton asks for the target once per device

    def get_current_stream(self, device: int) -> int:
        return 0


class CompileOnly:
    """Takes a kernel's place in the launching module."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._known: set[str] = set()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def compile_it(*arguments: object, **options: object) -> None:
            built = self._kernel.warmup(*arguments, grid=grid, **options)
            assert built.asm["cubin"]
            if built.hash in self._known:
                return
            self._known.add(built.hash)
            line = {"kernel": self._kernel.__name__, "capability": built.metadata.target.arch}
            print(json.dumps({**line, "shared": built.metadata.shared}))

        return compile_it


KERNELS = (
    *("sum_partitions", "merge_partitions", "attend_chunk", "write_row"),
    *("write_scaled_row", "quantise_row"),
)
HALF, EXACT, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn

CASES = (
    # capability, dims of K and V, format of the queries, format of the pools
    (90, (128, 128), HALF, HALF),
    (80, (48, 24), HALF, EXACT),
    (89, (128, 128), HALF, FP8),
)
MORE = (
    (80, (256, 256), HALF, HALF),
    (86, (512, 512), HALF, HALF),  # Gemma 4's widest layers
    (86, (512, 512), EXACT, EXACT),
    (89, (512, 512), HALF, FP8),
    (80, (192, 128), torch.float16, torch.float16),
    (86, (128, 128), HALF, HALF),
    (89, (80, 80), EXACT, EXACT),
    (90, (256, 256), EXACT, EXACT),
    (89, (256, 256), HALF, FP8),
    (90, (128, 128), HALF, FP8),
    (90, (192, 128), torch.float16, FP8),
    (100, (128, 128), HALF, FP8),
    (120, (64, 64), HALF, FP8),
    (100, (128, 128), HALF, HALF),
    (120, (64, 64), HALF, HALF),
)


BATCHES = (
    [(1, 300), (70, 260)],
    [(1, 5000), (3, 3), (1, 9)],
    [(1, 20)] * 16,
    [(64, 64)],
    [(1, 300)],
)
"""Steps of every kind of count: one, multiples of 16, others. One compilation serves them all."""


def compile_case(
    capability: int, dims: tuple[int, int], query: torch.dtype, pool: torch.dtype
) -> None:
    driver.set_active(Absent(capability))
    shape: dict[str, Any] = {"heads": 8, "kv_heads": 2, "dims": dims, "block_size": 16}
    everything: dict[str, Any] = {"window": 100, "softcap": 20.0, "sinks": torch.ones(8)}
    for lengths in BATCHES:
        case = make_case(1, lengths, pool_dtype=pool, **shape)
        plan = plan_of(case.batch, case.k_pool.shape[0], 16)
        pools = (case.k_pool, case.v_pool)
        for options in ({}, everything):
            attention.paged_attention(case.q.to(query), pools, plan, scaling=0.1, **options)
        k, v = (torch.zeros(len(lengths), 2, dim, dtype=query) for dim in dims)
        attention.kv_write(k, v, *pools, torch.zeros(len(lengths), dtype=torch.int32))
        if pool == FP8:
            for width in (4096, 14336):
                attention.quantise_rows(torch.zeros(len(lengths), width, dtype=query))


def main(everything: bool) -> None:
    for name in KERNELS:
        setattr(attention, name, CompileOnly(getattr(attention, name)))
    for case in (*CASES, *MORE) if everything else CASES:
        compile_case(*case)


if __name__ == "__main__":
    main("all" in sys.argv[1:])
