"""What callers hand to the kernels: the packed batch and the arithmetic of linear layers."""

from typing import Final, Literal

import torch
from msgspec import Struct

LinearKind = Literal["fp32", "bf16", "int8", "int8a16", "int4", "int4a16"]
"""Arithmetic of a linear layer. ``int8``: weights and inputs in groups of ``GROUP`` inputs, each
with a scale of its own, per output and per row. ``int4``: weights have 4 bits, a scale and a least
value per group and output, which is what GGUF's Q4_0 and Q4_1 hold; inputs as in ``int8``.
``int8a16``, ``int4a16``: the same weights, inputs in 16 bits.
"""

KIND_NUMBERS: Final[dict[LinearKind, int]] = {
    "fp32": 0,
    "bf16": 1,
    "int8": 2,
    "int8a16": 3,
    "int4": 4,
    "int4a16": 5,
}
INT8: Final[frozenset[LinearKind]] = frozenset({"int8", "int8a16"})
INT4: Final[frozenset[LinearKind]] = frozenset({"int4", "int4a16"})
BLOCK_COLUMNS: Final = 32
"""Columns of one packed block; biases are padded to it."""
GROUP: Final = 32
"""Inputs that share a scale."""


class AttentionBatch(Struct, frozen=True):
    """Which rows belong to which sequence, and where their KV lies. All int32, contiguous.

    ``tables`` [sequences, blocks] are block ids, ``query_start`` [sequences + 1] the first row
    of each sequence and the number of rows, ``context`` [sequences] the number of keys that the
    last row of each sequence sees, itself included.
    """

    tables: torch.Tensor
    query_start: torch.Tensor
    context: torch.Tensor

    def slots(self, block_size: int) -> torch.Tensor:
        """Return the pool slot of every row, int64 [rows]."""
        rows = self.query_start.diff().long()
        sequence = torch.repeat_interleave(torch.arange(len(rows)), rows)
        block = self.positions() // block_size
        table = self.tables[sequence, block].long()
        return table * block_size + self.positions() % block_size

    def alone(self, rows: torch.Tensor) -> "AttentionBatch":
        """Return the batch of some rows int64 whose sequences' earlier KV is in the pool."""
        sequence = torch.searchsorted(self.query_start, rows.int(), right=True) - 1
        later = self.query_start[sequence + 1] - rows - 1
        return AttentionBatch(
            tables=self.tables[sequence],
            query_start=torch.arange(len(rows) + 1, dtype=torch.int32),
            context=(self.context[sequence] - later).int(),
        )

    def positions(self) -> torch.Tensor:
        """Return the position of every row in its sequence, int64 [rows]."""
        rows = self.query_start.diff().long()
        total = int(rows.sum())
        first = self.context.long() - rows - self.query_start[:-1].long()
        return torch.arange(total) + torch.repeat_interleave(first, rows)
