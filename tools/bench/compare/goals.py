"""What the ratios to the peers should be, as a table, and whether a report meets them."""

from collections.abc import Sequence

from msgspec import Struct

from tools.bench.engine.figures import Cell, Growth, Kind, Shape
from tools.bench.page import Rows


class Goal(Struct, frozen=True, kw_only=True):
    """``ours`` in ms is to be at most ``bound`` times the best of ``peers`` at a shape.

    ``tokens`` None is the shortest context, or prompt, that was measured; KV may be of any dtype.
    """

    kind: Kind
    batch: int
    tokens: int | None
    ours: str
    peers: tuple[str, ...]
    bound: float


_VLLM = ("vllm-cpu-bf16", "vllm-cpu-w8a8")
_BATCHING = ("transformers-batching",)

GOALS = (
    Goal(kind="decode", batch=1, tokens=None, ours="diptych-int8", peers=_VLLM, bound=0.33),
    Goal(
        kind="decode", batch=1, tokens=None, ours="diptych-int8", peers=("llama.cpp",), bound=0.75
    ),
    Goal(kind="decode", batch=1, tokens=None, ours="diptych-int4", peers=_VLLM, bound=0.33),
    Goal(
        kind="decode", batch=1, tokens=None, ours="diptych-int4", peers=("llama.cpp",), bound=0.75
    ),
    Goal(kind="decode", batch=16, tokens=None, ours="diptych-int8", peers=_VLLM[1:], bound=1 / 1.4),
    Goal(kind="decode", batch=16, tokens=None, ours="diptych-int4", peers=_VLLM[1:], bound=1 / 1.4),
    Goal(kind="decode", batch=16, tokens=None, ours="diptych-int8", peers=_VLLM[:1], bound=1 / 2),
    Goal(
        kind="decode",
        batch=16,
        tokens=None,
        ours="diptych-int8",
        peers=("llama.cpp",),
        bound=1 / 3.5,
    ),
    Goal(kind="decode", batch=16, tokens=None, ours="diptych-bf16", peers=_VLLM[:1], bound=1 / 1.2),
    Goal(kind="prefill", batch=1, tokens=1024, ours="diptych-bf16", peers=_VLLM, bound=0.9),
    Goal(kind="prefill", batch=1, tokens=1024, ours="diptych-int8", peers=_VLLM, bound=0.6),
    Goal(kind="decode", batch=1, tokens=None, ours="diptych-bf16", peers=_BATCHING, bound=1.0),
    Goal(kind="decode", batch=16, tokens=None, ours="diptych-bf16", peers=_BATCHING, bound=1.0),
    Goal(kind="prefill", batch=1, tokens=1024, ours="diptych-bf16", peers=_BATCHING, bound=1.0),
)
GROWTH_BOUND = 1.2
"""What a longer context adds, in copies of its KV bytes."""


class Verdict(Struct, frozen=True, kw_only=True):
    """``ratio`` of our milliseconds to the best peer's; smaller is better.

    ``met``: it is at most ``bound``.
    """

    what: str
    ours: str
    peer: str
    ratio: float
    bound: float
    met: bool


class Ratio(Struct, frozen=True, kw_only=True):
    """Our milliseconds over the peer's at one shape."""

    ours: str
    peer: str
    shape: Shape
    ratio: float


def verdict(what: str, ours: str, peer: str, ratio: float, bound: float) -> Verdict:
    """Judge a ratio by its bound."""
    return Verdict(what=what, ours=ours, peer=peer, ratio=ratio, bound=bound, met=ratio <= bound)


def judge(cells: Sequence[Cell], grown: Sequence[Growth]) -> list[Verdict]:
    """Return a verdict for every goal whose figures are there."""
    verdicts = [found for goal in GOALS for found in _judge(goal, cells)]
    for growth in grown:
        what = f"{growth.short.label} to {growth.long.tokens:,}"
        verdicts.append(verdict(what, growth.engine, "memory copy", growth.ratio, GROWTH_BOUND))
    return verdicts


def _judge(goal: Goal, cells: Sequence[Cell]) -> list[Verdict]:
    def fits(cell: Cell) -> bool:
        shape = cell.shape
        return (shape.kind, shape.batch) == (goal.kind, goal.batch) and goal.tokens in (
            None,
            shape.tokens,
        )

    verdicts = []
    for name in dict.fromkeys(cell.engine for cell in cells):
        if name != goal.ours and not name.startswith(f"{goal.ours}-kv-"):
            continue
        mine = [cell for cell in cells if fits(cell) and cell.engine == name]
        own = min(mine, key=lambda cell: cell.shape.tokens, default=None)
        others = [c for c in cells if own and c.shape == own.shape and c.engine in goal.peers]
        if own is None or not others:
            continue
        best = min(others, key=lambda cell: cell.median)
        ratio = own.median / best.median
        verdicts.append(verdict(own.shape.label, name, best.engine, ratio, goal.bound))
    return verdicts


def verdict_rows(verdicts: Sequence[Verdict]) -> Rows:
    """Return the goals as a table."""
    body = [
        [v.what, v.ours, v.peer, f"{v.ratio:.2f}", f"{v.bound:.2f}", "yes" if v.met else "no"]
        for v in verdicts
    ]
    return [["figure", "ours", "against", "ratio", "at most", "met"], *body]


def ratios_of(cells: Sequence[Cell], shapes: Sequence[Shape], names: Sequence[str]) -> list[Ratio]:
    """Return our time over each peer's, pair by pair, wherever both have figures."""
    at = {(cell.engine, cell.shape): cell.median for cell in cells}
    return [
        Ratio(ours=own, peer=peer, shape=shape, ratio=at[own, shape] / at[peer, shape])
        for own, peer in _pairs(names)
        for shape in shapes
        if (own, shape) in at and (peer, shape) in at
    ]


def ratio_rows(cells: Sequence[Cell], shapes: Sequence[Shape], names: Sequence[str]) -> Rows:
    """Return the same as a table, one row per pair, one column per shape."""
    at = {(r.ours, r.peer, r.shape): r.ratio for r in ratios_of(cells, shapes, names)}
    body = [
        [f"{own} / {peer}", *(_two_digits(at.get((own, peer, shape))) for shape in shapes)]
        for own, peer in _pairs(names)
    ]
    return [["ms / ms", *(shape.label for shape in shapes)], *body]


def _pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    ours = [name for name in names if name.startswith("diptych-")]
    return [(own, peer) for own in ours for peer in names if peer not in ours]


def _two_digits(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"
