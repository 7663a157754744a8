"""The packed batch of one forward pass, built once per step."""

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from shared.engine.batch import SequenceInput
from shared.kernels.types import AttentionBatch

IntArray = npt.NDArray[np.int64]
BlockTable = Sequence[int] | IntArray

OnLayer = Callable[[int], None]


class PackedStep:
    """Sequences one after the other on one row axis.

    ``rows`` [sequences + 1] are the first row of each sequence and the number of rows;
    ``token_ids`` and ``positions`` [1, rows] are int64.

    Args:
        sequences: at least one, each with at least one token and a table that covers it.
        tables: block table of each sequence.
        block_size: tokens per block.
    """

    def __init__(
        self, sequences: Sequence[SequenceInput], tables: Sequence[BlockTable], block_size: int
    ) -> None:
        self._block_size = block_size
        counts = np.fromiter((len(s.tokens) for s in sequences), np.int64, len(sequences))
        starts = np.fromiter((s.start for s in sequences), np.int64, len(sequences))
        self.rows: IntArray = np.concatenate(([0], np.cumsum(counts)))
        ends = starts + counts
        tokens = (t for s in sequences for t in s.tokens)
        self.token_ids = torch.from_numpy(np.fromiter(tokens, np.int64, int(self.rows[-1])))[None]
        positions = np.arange(self.rows[-1]) + np.repeat(starts - self.rows[:-1], counts)
        self.positions = torch.from_numpy(positions)[None]
        padded = np.zeros((len(sequences), max(len(t) for t in tables)), dtype=np.int32)
        for row, table in enumerate(tables):
            padded[row, : len(table)] = table
        self.batch = AttentionBatch(
            tables=torch.from_numpy(padded),
            query_start=torch.from_numpy(self.rows.astype(np.int32)),
            context=torch.from_numpy(ends.astype(np.int32)),
        )

    @cached_property
    def slots(self) -> torch.Tensor:
        """Pool slot of every row, int64 [rows]."""
        return self.batch.slots(self._block_size)
