"""Which programs a batch needs: worked out once per step on the CPU, used by every layer."""

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Struct

from shared.kernels.types import AttentionBatch

Int32 = npt.NDArray[np.int32]

TILE_ROWS = 64
"""Rows of one chunk that one program works on."""


class Work(Struct, frozen=True):
    """``decodes`` [n] are the sequences with one row, ``tiles`` [t, 2] the sequence and first row
    (counted within the chunk) of each tile of the others. ``longest`` is the longest context of
    a decode, 0 without any.
    """

    decodes: Int32
    tiles: Int32
    longest: int


class Plan(Struct, frozen=True):
    """A batch on the device, int32 and contiguous.

    ``tables`` [columns, sequences]: the first block of every sequence, then the second of every
    sequence, and so on. ``longest`` bounds the contexts of ``decodes``. ``host`` is the batch in
    ordinary memory; None in a graph, which serves many batches.
    """

    tables: torch.Tensor
    query_start: torch.Tensor
    context: torch.Tensor
    decodes: torch.Tensor
    tiles: torch.Tensor
    longest: int
    host: AttentionBatch | None = None


def work_of(batch: AttentionBatch, blocks: int, block_size: int) -> Work:
    """Sort the sequences of a CPU batch by what computes them.

    Raises:
        RuntimeError: a table leaves the pool of ``blocks``, or is shorter than its context.
    """
    tables, context = batch.tables.numpy(), batch.context.numpy()
    rows = np.diff(batch.query_start.numpy())
    if (rows < 1).any() or (context < rows).any():
        raise RuntimeError("a context is shorter than its rows, or a sequence has none")
    used = -(-context // block_size)
    if (used > tables.shape[1]).any():
        raise RuntimeError("a block table is shorter than its context")
    live = np.arange(tables.shape[1])[None] < used[:, None]
    if (live & ((tables < 0) | (tables >= blocks))).any():
        raise RuntimeError(f"a block is outside the pool of {blocks}")
    decodes = np.flatnonzero(rows == 1).astype(np.int32)
    chunks = np.flatnonzero(rows > 1).astype(np.int32)
    counts = -(-rows[chunks] // TILE_ROWS)
    before = np.repeat(np.cumsum(counts) - counts, counts)
    offsets = (np.arange(counts.sum()) - before) * TILE_ROWS
    tiles = np.stack((np.repeat(chunks, counts), offsets.astype(np.int32)), axis=1)
    longest = int(context[decodes].max()) if len(decodes) else 0
    return Work(decodes, np.ascontiguousarray(tiles, dtype=np.int32), longest)


def plan_of(batch: AttentionBatch, blocks: int, block_size: int) -> Plan:
    """Return the plan of a CPU batch, on the CPU. Raises as ``work_of``."""
    work = work_of(batch, blocks, block_size)
    return Plan(
        batch.tables.t().contiguous(),
        batch.query_start,
        batch.context,
        torch.from_numpy(work.decodes),
        torch.from_numpy(work.tiles),
        work.longest,
        batch,
    )
