"""Plain fp32 attention, written for reading, and batches whose unused memory is poisoned."""

import math

import torch
from msgspec import Struct

from shared.kernels.kv_rows import from_rows, to_rows
from shared.kernels.types import AttentionBatch


class Case(Struct, frozen=True):
    q: torch.Tensor
    k_pool: torch.Tensor
    v_pool: torch.Tensor
    batch: AttentionBatch


def make_case(
    seed: int,
    lengths: list[tuple[int, int]],
    *,
    heads: int,
    kv_heads: int,
    dims: tuple[int, int],
    block_size: int,
    pool_dtype: torch.dtype,
) -> Case:
    """Return a batch of (queries, context) sequences over shuffled blocks.

    ``dims`` are those of K and V. Every slot that no sequence owns holds NaN, in K and V alike.
    """
    k_dim, v_dim = dims
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-context // block_size) for _, context in lengths]
    total = sum(counts) + 2
    order = torch.randperm(total, generator=generator).int()
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    k_pool, v_pool = (
        to_rows(torch.full((total, block_size, kv_heads, dim), math.nan), pool_dtype)
        for dim in dims
    )
    first = 0
    for i, (count, (_, context)) in enumerate(zip(counts, lengths, strict=True)):
        tables[i, :count] = order[first : first + count]
        first += count
        used = slots_of(tables[i], context, block_size)
        for pool, dim in ((k_pool, k_dim), (v_pool, v_dim)):
            fresh = torch.randn(context, kv_heads, dim, generator=generator)
            pool.flatten(0, 1)[used] = to_rows(fresh, pool_dtype)
    queries = torch.tensor([0] + [n for n, _ in lengths]).cumsum(0).int()
    batch = AttentionBatch(tables, queries, torch.tensor([c for _, c in lengths]).int())
    rows = int(queries[-1])
    # As transformers hands it over: heads first, seen with rows first.
    q = torch.randn(heads, rows, k_dim, generator=generator).transpose(0, 1)
    return Case(q, k_pool, v_pool, batch)


def slots_of(table: torch.Tensor, context: int, block_size: int) -> torch.Tensor:
    positions = torch.arange(context)
    return table[positions // block_size].long() * block_size + positions % block_size


def attention(
    case: Case,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend one query at a time in fp32."""
    rows = []
    block_size = case.k_pool.shape[1]
    group = case.q.shape[1] // case.k_pool.shape[2]
    for s, context in enumerate(case.batch.context.tolist()):
        first, last = case.batch.query_start[s : s + 2].tolist()
        slots = slots_of(case.batch.tables[s], context, block_size)
        k, v = (
            from_rows(pool.flatten(0, 1)[slots]).float().repeat_interleave(group, 1)
            for pool in (case.k_pool, case.v_pool)
        )
        for row in range(first, last):
            newest = context - last + row
            low = 0 if window is None else max(0, newest - window + 1)
            seen = slice(low, newest + 1)
            scores = torch.einsum("hd,khd->hk", case.q[row].float(), k[seen]) * scaling
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            if sinks is not None:
                scores = torch.cat((scores, sinks[:, None]), dim=1)
            weights = torch.softmax(scores, dim=1)[:, : newest + 1 - low]
            rows.append(torch.einsum("hk,khd->hd", weights, v[seen]))
    return torch.stack(rows)
