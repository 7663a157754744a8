"""What ``diptych bench transfer`` measures, and what it finds."""

from itertools import pairwise

from msgspec import Struct

from shared.kv.codecs.frame import CodecName
from shared.kv.layout import KvLayout
from shared.worker.pipelining import announced_layers
from tools.slow_link.shaping import LinkProfile

Path = str
"""``ipc``, ``host``, ``nixl``, or ``host x2``: the same over two sockets."""


class TransferPlan(Struct, frozen=True, kw_only=True):
    """What to measure. ``prefill_rate``: tokens per second of the paced prefill, whose layers are
    announced as a worker does or, if set, every ``notify_layers``.

    ``codecs`` are those of the ``host`` path, plain (``none``) first. With a ``link`` the sender
    is on another host at its far end, and only ``host`` is measured. ``device``: where both pools
    are, or sender's and reader's with a comma between. With several ``sockets`` the plain bytes of
    ``host`` are measured over so many, too. ``nixl``: that library is there to be measured.
    """

    layout: KvLayout
    lengths: tuple[int, ...]
    prefill_rate: float
    chunk_tokens: int = 512
    notify_layers: int | None = None
    chunk_bytes: int = 512 << 10
    slots: int = 32
    repeats: int = 5
    codecs: tuple[CodecName, ...] = ("none",)
    link: LinkProfile | None = None
    device: str = "cpu"
    sockets: int = 1
    nixl: bool = False

    @property
    def movers(self) -> tuple[tuple[Path, CodecName], ...]:
        """Every path with its codec, in the order of the report."""
        host: tuple[tuple[Path, CodecName], ...] = tuple(("host", name) for name in self.codecs)
        if self.sockets > 1:
            host += ((f"host x{self.sockets}", "none"),)
        if self.link is not None:
            return host
        return (("ipc", "none"), *host, *((("nixl", "none"),) if self.nixl else ()))

    def blocks(self, tokens: int) -> int:
        """Return the blocks of so many tokens."""
        return -(-tokens // self.layout.block_size)

    def size(self, tokens: int) -> int:
        """Return the bytes of the blocks of so many tokens."""
        return self.blocks(tokens) * self.layout.block_bytes


class TransferRow(Struct, frozen=True, kw_only=True):
    """One path, codec and prompt length. Times in seconds, rates in raw bytes per second.

    ``wire``: bytes that travelled. ``seconds``: all KV at once. ``visible``: between the end of
    the prefill and the arrival of its KV, with layers announced while it runs or
    (``visible_off``) at its end only. ``share`` is the rate over ``reference``: memcpy (on
    a GPU: a copy within it) for ``ipc`` and ``nixl``, two raw sockets for ``host``. ``of_link``:
    the bytes on the wire per second, over those of a simulated link with a limit. ``of_plain``:
    ``visible_off`` over that of the plain bytes of this path.
    """

    path: Path
    codec: CodecName
    tokens: int
    bytes: int
    wire: int
    seconds: float
    rate: float
    reference: float
    share: float
    visible: float
    visible_off: float
    overlap: float
    of_plain: float
    cpu_seconds: float
    of_link: float | None = None


class Span(Struct, frozen=True):
    """Layers of blocks that become readable ``at`` seconds after the prefill began."""

    at: float
    first_layer: int
    end_layer: int
    first_block: int
    end_block: int


def everything(plan: TransferPlan, tokens: int, at: float = 0.0) -> list[Span]:
    """Return one announcement of all KV."""
    return [Span(at, 0, len(plan.layout.layers), 0, plan.blocks(tokens))]


def schedule(plan: TransferPlan, tokens: int, *, pipeline: bool) -> list[Span]:
    """Return the announcements of a prefill that computes at an even pace."""
    layers, size = len(plan.layout.layers), plan.layout.block_size
    if not pipeline:
        return everything(plan, tokens, tokens / plan.prefill_rate)
    spans = []
    for start in range(0, tokens, plan.chunk_tokens):
        end = min(tokens, start + plan.chunk_tokens)
        blocks = start // size, -(-end // size)
        ends = announced_layers(plan.layout.token_bytes, end - start, plan.notify_layers)
        for first, last in pairwise((0, *ends)):
            at = (start + (end - start) * last / layers) / plan.prefill_rate
            spans.append(Span(at, first, last, *blocks))
    return spans
