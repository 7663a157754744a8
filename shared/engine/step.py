"""The packed batch of one forward pass and what its attention must read, built once per step."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from shared.engine.batch import SequenceInput

IntArray = npt.NDArray[np.int64]

_MAX_PADDING = 2
"""A decode group's longest context is at most this many times its shortest."""


class DecodeGroup:
    """Packed rows [``first``, ``last``), one query each, contexts padded to one length.

    ``slots`` [rows * length] are pool slots; padding repeats the row's own newest slot, so
    nothing of another sequence is ever read. ``mask`` [rows, 1, 1, length] is additive.
    """

    __slots__ = ("first", "last", "length", "mask", "slots")

    def __init__(
        self, first: int, last: int, length: int, slots: torch.Tensor, mask: torch.Tensor | None
    ) -> None:
        self.first = first
        self.last = last
        self.length = length
        self.slots = slots
        self.mask = mask


class Chunk:
    """Packed rows [``first``, ``last``) of one sequence over one context.

    ``slots`` [length] is None where the context is the chunk itself (nothing to gather).
    ``mask`` [rows, length] is additive; None means plain lower-triangular causality.
    """

    __slots__ = ("first", "last", "mask", "slots")

    def __init__(
        self, first: int, last: int, slots: torch.Tensor | None, mask: torch.Tensor | None
    ) -> None:
        self.first = first
        self.last = last
        self.slots = slots
        self.mask = mask


class AttentionPlan:
    """Everything the layers with one window size read in this step."""

    __slots__ = ("chunks", "decodes")

    def __init__(self, decodes: list[DecodeGroup], chunks: list[Chunk]) -> None:
        self.decodes = decodes
        self.chunks = chunks


class PackedStep:
    """Sequences packed into one row axis: decodes first, longest context first, then chunks.

    Args:
        sequences: at least one, each with at least one token and a table that covers it.
        tables: block table of each sequence.
        block_size: tokens per block.
        dtype: dtype of queries, for additive masks.
    """

    def __init__(
        self,
        sequences: Sequence[SequenceInput],
        tables: Sequence[IntArray],
        block_size: int,
        dtype: torch.dtype,
    ) -> None:
        self._block_size = block_size
        self._dtype = dtype
        self._plans: dict[int | None, AttentionPlan] = {}
        self.order = sorted(
            range(len(sequences)),
            key=lambda i: (len(sequences[i].tokens) > 1, -sequences[i].start),
        )
        packed = [sequences[i] for i in self.order]
        self._tables = [tables[i] for i in self.order]
        self._starts = [s.start for s in packed]
        self._ends = [s.start + len(s.tokens) for s in packed]
        self._num_decodes = sum(len(s.tokens) == 1 for s in packed)
        self.rows = np.cumsum([0] + [len(s.tokens) for s in packed])
        """First row of each packed sequence, and the number of rows."""
        positions = np.concatenate(
            [np.arange(a, b) for a, b in zip(self._starts, self._ends, strict=True)]
        )
        self.token_ids = torch.tensor([[t for s in packed for t in s.tokens]])
        self.positions = torch.from_numpy(positions)[None]
        slots = np.concatenate(
            [
                self._slots(table, start, end)
                for table, start, end in zip(self._tables, self._starts, self._ends, strict=True)
            ]
        )
        self.slots = torch.from_numpy(slots)

    def _slots(self, table: IntArray, start: int, end: int) -> IntArray:
        positions = np.arange(start, end)
        blocks, offsets = np.divmod(positions, self._block_size)
        slots: IntArray = table[blocks] * self._block_size + offsets
        return slots

    def plan(self, window: int | None) -> AttentionPlan:
        """Return the plan of layers with this window; a window counts the query itself."""
        plan = self._plans.get(window)
        if plan is None:
            plan = self._plans[window] = AttentionPlan(
                self._decode_groups(window),
                [self._chunk(i, window) for i in range(self._num_decodes, len(self._starts))],
            )
        return plan

    def _decode_groups(self, window: int | None) -> list[DecodeGroup]:
        lengths = [
            end if window is None else min(end, window) for end in self._ends[: self._num_decodes]
        ]
        groups: list[DecodeGroup] = []
        first = 0
        while first < len(lengths):
            last = first + 1
            while last < len(lengths) and lengths[first] <= _MAX_PADDING * lengths[last]:
                last += 1
            groups.append(self._decode_group(first, last, lengths[first:last]))
            first = last
        return groups

    def _decode_group(self, first: int, last: int, lengths: list[int]) -> DecodeGroup:
        longest = lengths[0]
        slots = np.empty((last - first, longest), dtype=np.int64)
        for row, length in enumerate(lengths):
            end = self._ends[first + row]
            slots[row, :length] = self._slots(self._tables[first + row], end - length, end)
            slots[row, length:] = slots[row, length - 1]
        mask = None
        if lengths[-1] < longest:
            hidden = torch.arange(longest)[None] >= torch.tensor(lengths)[:, None]
            mask = self._additive(hidden)[:, None, None]
        return DecodeGroup(first, last, longest, torch.from_numpy(slots.reshape(-1)), mask)

    def _chunk(self, index: int, window: int | None) -> Chunk:
        start, end = self._starts[index], self._ends[index]
        first, last = int(self.rows[index]), int(self.rows[index + 1])
        low = 0 if window is None else max(0, start - window + 1)
        if start == 0 and (window is None or end <= window):
            return Chunk(first, last, None, None)
        slots = None
        if start > 0:
            slots = torch.from_numpy(self._slots(self._tables[index], low, end))
        queries = torch.arange(start, end)[:, None]
        keys = torch.arange(low, end)[None]
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        return Chunk(first, last, slots, self._additive(hidden))

    def _additive(self, hidden: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(hidden.shape, dtype=self._dtype)
        return mask.masked_fill_(hidden, float("-inf"))


OnLayer = Callable[[int], None]
