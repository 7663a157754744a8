"""One KV hand-over as its reader sees it: what was announced, asked for and copied. Pure."""

from msgspec import Struct

from shared.ids import TransferId
from shared.messages.prefill_decode import KvReady, ReadyBlocks, TransferComplete
from shared.worker.events import SourceKey
from shared.worker.ledger import Hold
from shared.worker.live import Window, first_live_block
from shared.worker.sequence import Sequence

Windows = tuple[Window, ...]


class BrokenTransfer(Exception):
    """The source announced what does not fit together; the sentence says what."""


class Span(Struct, frozen=True):
    """Blocks [``first_block``, ``end_block``) of layers [``first_layer``, ``end_layer``)."""

    first_layer: int
    end_layer: int
    first_block: int
    end_block: int


class Pull:
    """Mutable; owned by ``HandoverSink``.

    Announcements must extend what is known without a gap, per layer. A block is copied once
    per layer, when the announcements reach its end (or the end of the KV), so no copy ever
    sees a block that its owner still writes to. Of a layer with a window (one of ``windows``)
    only the blocks are copied that later tokens read. ``pipelined``: announcements are asked for
    while prefill computes. ``fair``: what the pull takes is what its copies take.
    """

    def __init__(
        self,
        sequence: Sequence,
        source: SourceKey,
        transfer: TransferId,
        windows: Windows,
        now: float,
    ) -> None:
        self.sequence = sequence
        self.source = source
        self.transfer = transfer
        self.progress = now
        self.completed = now
        self.announced = False
        self.pipelined = True
        self.fair = False
        self.hold: Hold | None = None
        self.complete: TransferComplete | None = None
        self.table = ReadyBlocks((), ())
        self.whole_from = 0
        self._total = len(sequence.tokens)
        self._windows = windows
        self._covered = [0] * len(windows)
        self._issued = [0] * len(windows)
        self._num_blocks = 0
        self._block_size = 0

    @property
    def reserved(self) -> bool:
        """True once the sequence has its blocks."""
        return self.hold is not None

    @property
    def needs_source(self) -> bool:
        """True once the source has begun and while the next move is not this worker's."""
        return self.announced and (self.complete is None or self.reserved)

    @property
    def arrived(self) -> bool:
        """True when everything was announced, asked for, copied and found unchanged."""
        return (
            self.complete is not None
            and self.hold is not None
            and self.hold.jobs == 0
            and all(issued == self._num_blocks for issued in self._issued)
        )

    def announce(self, message: KvReady) -> None:
        """Take an announcement in; one that repeats what is known changes nothing.

        Raises:
            BrokenTransfer: it leaves a gap, exceeds the KV, or contradicts the block table.
        """
        end = message.first_token + message.num_tokens
        layers = range(message.first_layer, message.end_layer)
        if message.num_tokens < 1 or message.first_token < 0 or end > self._total:
            raise BrokenTransfer(f"tokens {message.first_token}..{end} of {self._total}")
        if not layers or layers.start < 0 or layers.stop > len(self._covered):
            raise BrokenTransfer(f"layers {layers.start}..{layers.stop} of {len(self._covered)}")
        if message.table is not None:
            self._extend_table(message.table)
        for layer in layers:
            if self._covered[layer] < message.first_token:
                raise BrokenTransfer(
                    f"tokens {self._covered[layer]}..{message.first_token} "
                    f"of layer {layer} were never announced"
                )
            self._covered[layer] = max(self._covered[layer], end)
        self.announced = True

    def finish(self, message: TransferComplete) -> None:
        """Take the end of the announcements in.

        Raises:
            BrokenTransfer: something is missing, or it is not the KV that was asked for.
        """
        if message.index != self.sequence.outputs:
            raise BrokenTransfer(f"output token {message.index}, not {self.sequence.outputs}")
        if not message.finished:
            if message.num_tokens != self._total:
                raise BrokenTransfer(f"KV of {message.num_tokens} tokens, not {self._total}")
            if min(self._covered) != self._total:
                raise BrokenTransfer(f"it ended after {min(self._covered)} of {self._total} tokens")
        self.announced = True
        self.complete = message
        self.fair = self.fair and self.reserved

    def reserve(self, hold: Hold, block_size: int) -> None:
        """The sequence has its blocks; those it shares with its own prefix cache are skipped."""
        self.hold = hold
        self._block_size = block_size
        self._num_blocks = len(self.sequence.blocks)
        live = [first_live_block(window, self._total, block_size) for window in self._windows]
        self.whole_from = max(live)
        self._issued = [max(self.sequence.sealed, first) for first in live]

    def unreserve(self) -> Hold:
        """The blocks are taken back; all must be copied again once there are others."""
        hold = self.hold
        assert hold is not None
        self.hold = None
        self.fair = False
        self._issued = [0] * len(self._issued)
        return hold

    def ready_spans(self) -> list[Span]:
        """Return what can be copied now and count it as asked for."""
        if self.hold is None:
            return []
        spans: list[Span] = []
        for layer, (covered, issued) in enumerate(zip(self._covered, self._issued, strict=True)):
            end = self._num_blocks if covered == self._total else covered // self._block_size
            if end > len(self.table.blocks):
                raise BrokenTransfer(f"only {len(self.table.blocks)} of {end} readable blocks")
            if end <= issued:
                continue
            self._issued[layer] = end
            last = spans[-1] if spans else None
            if last and (last.end_layer, last.first_block, last.end_block) == (layer, issued, end):
                spans[-1] = Span(last.first_layer, layer + 1, issued, end)
            else:
                spans.append(Span(layer, layer + 1, issued, end))
        return spans

    def tokens_of(self, span: Span) -> int:
        """Return how many tokens of the KV are in these blocks."""
        size = self._block_size
        return min(self._total, span.end_block * size) - span.first_block * size

    def _extend_table(self, table: ReadyBlocks) -> None:
        if len(table.blocks) != len(table.generations) or len(table.blocks) > self._total:
            raise BrokenTransfer("a malformed block table")
        known, told = _entries(self.table), _entries(table)
        if any(one != other for one, other in zip(known, told, strict=False)):
            raise BrokenTransfer("another block table than before")
        if len(told) > len(known):
            self.table = table


def _entries(table: ReadyBlocks) -> list[tuple[int, int]]:
    return list(zip(table.blocks, table.generations, strict=True))
