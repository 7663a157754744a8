"""All integers of a step in one flat buffer, so that a step costs one copy to the device.

int32, one after the other: token ids [rows], positions [rows], slots [rows], context
[sequences], query_start [sequences + 1], decodes [decodes], tiles [tiles, 2], and last the block
tables column after column [columns, sequences]: a step that needs few columns of a wide table
then ends early in the buffer. Each part begins at a multiple of 16 bytes: a kernel is compiled
anew for pointers of other alignment, and no step should wait for that.
"""

from typing import Final

import numpy as np
import torch
from msgspec import Struct

from shared.engine.step import PackedStep
from shared.kernels.gpu.plan import Int32, Plan, Work
from shared.kernels.types import AttentionBatch

_ALIGNED: Final = 4
"""Elements of int32 in 16 bytes."""


class StepShape(Struct, frozen=True):
    """Sizes of the parts of a buffer."""

    rows: int
    sequences: int
    decodes: int
    tiles: int
    columns: int

    @property
    def parts(self) -> list[slice]:
        """Where the parts are, in the order above."""
        counts = (
            *(self.rows,) * 3,
            self.sequences,
            self.sequences + 1,
            self.decodes,
            2 * self.tiles,
            self.columns * self.sequences,
        )
        begin, parts = 0, []
        for count in counts:
            parts.append(slice(begin, begin + count))
            begin += -(-count // _ALIGNED) * _ALIGNED
        return parts

    @property
    def size(self) -> int:
        """Elements in all."""
        return int(self.parts[-1].stop)


class StepTensors(Struct, frozen=True):
    """A step on the device: views of one buffer. ``token_ids`` and ``positions`` are [1, rows]."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    plan: Plan


def shape_of(step: PackedStep, work: Work) -> StepShape:
    """Return the shape that fits a step exactly."""
    return StepShape(
        rows=int(step.rows[-1]),
        sequences=len(step.rows) - 1,
        decodes=len(work.decodes),
        tiles=len(work.tiles),
        columns=step.batch.tables.shape[1],
    )


def graph_shape(bucket: int, columns: int) -> StepShape:
    """Return the shape of ``bucket`` decodes with tables of up to ``columns`` blocks."""
    return StepShape(rows=bucket, sequences=bucket, decodes=bucket, tiles=0, columns=columns)


def tensors(
    flat: torch.Tensor, shape: StepShape, longest: int, host: AttentionBatch | None = None
) -> StepTensors:
    """Return the parts of a buffer, no copy; ``longest`` and ``host`` as in ``Plan``."""
    parts = [flat[part] for part in shape.parts]
    token_ids, positions, slots, context, query_start, decodes, tiles, tables = parts
    plan = Plan(
        tables=tables.view(shape.columns, shape.sequences),
        query_start=query_start,
        context=context,
        decodes=decodes,
        tiles=tiles.view(shape.tiles, 2),
        longest=longest,
        host=host,
    )
    return StepTensors(token_ids[None], positions[None], slots, plan)


def pack(buffer: Int32, shape: StepShape, step: PackedStep, work: Work) -> int:
    """Fill a buffer of the step's own shape; return how many elements it has."""
    batch = step.batch
    values = (
        step.token_ids[0].numpy(),
        step.positions[0].numpy(),
        step.slots.numpy(),
        batch.context.numpy(),
        batch.query_start.numpy(),
        work.decodes,
        work.tiles.reshape(-1),
        batch.tables.numpy().T.reshape(-1),
    )
    for part, value in zip(shape.parts, values, strict=True):
        buffer[part] = value
    return shape.size


def pack_decodes(
    buffer: Int32, shape: StepShape, step: PackedStep, scratch: int, block_size: int
) -> int:
    """Fill a graph's buffer with a step of decodes; return how many elements matter.

    Rows past the step's are sequences of one token in block ``scratch``, which is nobody's:
    what they write is never read.
    """
    bucket, count = shape.rows, len(step.rows) - 1
    columns = step.batch.tables.shape[1]
    *fixed, whole = shape.parts
    end = int(whole.start) + columns * bucket
    buffer[:end] = 0
    token_ids, positions, slots, context, query_start, decodes, _ = (buffer[p] for p in fixed)
    token_ids[:count] = step.token_ids[0].numpy()
    positions[:count] = step.positions[0].numpy()
    slots[:count] = step.slots.numpy()
    slots[count:] = scratch * block_size
    context[:count] = step.batch.context.numpy()
    context[count:] = 1
    query_start[:] = np.arange(bucket + 1)
    decodes[:] = np.arange(bucket)
    tables = buffer[whole.start : end].reshape(columns, bucket)
    tables[:, :count] = step.batch.tables.numpy().T
    tables[:, count:] = scratch
    return end
