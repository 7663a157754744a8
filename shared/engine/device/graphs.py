"""Decode steps recorded once per batch size and replayed with new inputs in the same memory.

A decode step of a small batch takes less time to compute than to launch, kernel by kernel; a
graph is one launch. It is bound to its memory and its batch size: so there is one for each of a
few sizes, and a batch between two sizes is filled up with rows that nobody reads.
"""

import bisect
import logging
from collections.abc import Callable
from typing import Final, Protocol

import torch

from shared.device.device import Graph
from shared.engine.device.buffers import (
    StepShape,
    StepTensors,
    graph_shape,
    pack_decodes,
    tensors,
)
from shared.engine.step import PackedStep
from shared.kernels.gpu.plan import Work

log = logging.getLogger(__name__)

_STEP: Final = 32
_EXACT: Final = (1, 2, 4, 8, 16)


def buckets_up_to(most: int) -> tuple[int, ...]:
    """Return the batch sizes with a graph of their own: 1, 2, 4, 8, 16, 32, 64, … and ``most``."""
    sizes = {size for size in _EXACT if size < most}
    size = _STEP
    while size < most:
        sizes.add(size)
        size *= 2
    return tuple(sorted(sizes | {most}))


class Recorder(Protocol):
    """What recording needs of a ``Device``."""

    def record(self, work: Callable[[], None]) -> Graph | None: ...

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> None: ...


class _Recorded:
    """One graph with the memory it reads and writes."""

    __slots__ = ("flat", "graph", "logits", "shape")

    def __init__(self, shape: StepShape, flat: torch.Tensor, logits: torch.Tensor) -> None:
        self.shape = shape
        self.flat = flat
        self.logits = logits
        self.graph: Graph | None = None


Forward = Callable[[StepTensors], torch.Tensor]
"""A forward pass; returns the logits of all rows [rows, vocabulary]."""


class DecodeGraphs:
    """The graphs of one model over one pool.

    Args:
        recorder: the device.
        sizes: batch sizes, ascending.
        columns: blocks of the longest sequence.
        block_size: tokens per block.
        scratch: block that rows without a sequence write to.
    """

    def __init__(
        self,
        recorder: Recorder,
        sizes: tuple[int, ...],
        *,
        columns: int,
        block_size: int,
        scratch: int,
    ) -> None:
        self._recorder = recorder
        self._sizes = sizes
        self._columns = columns
        self._block_size = block_size
        self._scratch = scratch
        self._recorded: dict[int, _Recorded] = {}

    @property
    def sizes(self) -> tuple[int, ...]:
        """Batch sizes that have been recorded."""
        return tuple(sorted(self._recorded))

    def buffer_size(self) -> int:
        """Return the elements of the largest buffer."""
        return graph_shape(self._sizes[-1], self._columns).size

    def record(self, forward: Forward, flats: Callable[[int], torch.Tensor]) -> bool:
        """Record every size, the largest first, whose memory the others then share.

        ``flats(n)`` gives int32 [n] on the device. Each size runs twice before it is recorded:
        kernels are compiled and libraries set up outside of graphs. False if the device records
        nothing, or the model does what no graph can hold; then there are no graphs at all.
        """
        longest = self._columns * self._block_size
        for size in reversed(self._sizes):
            shape = graph_shape(size, self._columns)
            flat = flats(shape.size)
            step = tensors(flat, shape, longest)
            self._blank(flat, shape)
            try:
                logits = forward(step).clone()
                recorded = _Recorded(shape, flat, logits)

                def work(step: StepTensors = step, logits: torch.Tensor = logits) -> None:
                    logits.copy_(forward(step))

                work()
                recorded.graph = self._recorder.record(work)
            except RuntimeError as error:
                log.warning("decode steps are launched kernel by kernel, not as graphs: %s", error)
                self._recorded.clear()
                return False
            if recorded.graph is None:
                self._recorded.clear()
                return False
            self._recorded[size] = recorded
        return True

    def size_for(self, step: PackedStep, work: Work) -> int | None:
        """Return the size whose graph runs this step, None where it must run without one."""
        count = len(step.rows) - 1
        if len(work.decodes) != count or step.batch.tables.shape[1] > self._columns:
            return None
        sizes = self.sizes
        at = bisect.bisect_left(sizes, count)
        return sizes[at] if at < len(sizes) else None

    def run(self, size: int, step: PackedStep, host: torch.Tensor) -> torch.Tensor:
        """Replay with a step's inputs; its logits [sequences, vocabulary].

        They are a view that the next replay overwrites. ``host`` is a buffer of
        ``buffer_size()`` elements that no copy reads any more.
        """
        recorded = self._recorded[size]
        used = pack_decodes(host.numpy(), recorded.shape, step, self._scratch, self._block_size)
        self._recorder.upload(host[:used], recorded.flat[:used])
        assert recorded.graph is not None
        recorded.graph.replay()
        return recorded.logits[: len(step.rows) - 1]

    def _blank(self, flat: torch.Tensor, shape: StepShape) -> None:
        """Make every row one of nobody's, so that recording harms no sequence."""
        flat.zero_()
        step = tensors(flat, shape, 0)
        step.slots.fill_(self._scratch * self._block_size)
        step.plan.context.fill_(1)
        for part in (step.plan.query_start, step.plan.decodes):
            part.copy_(torch.arange(len(part), dtype=torch.int32))
        step.plan.tables.fill_(self._scratch)
