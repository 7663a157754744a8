"""What the ratios to the peers should be, as a table, and whether a report meets them."""

from collections.abc import Sequence

from msgspec import Struct

from tools.bench.engine.figures import Cell, Growth, Kind, Shape
from tools.bench.page import Rows


class Goal(Struct, frozen=True, kw_only=True):
    """``ours`` in ms is to be at most ``bound`` times the best of ``peers`` at a shape.

    ``tokens`` None is the shortest context, or prompt, that was measured.
    """

    kind: Kind
    batch: int
    tokens: int | None
    ours: str
    peers: tuple[str, ...]
    bound: float


_VLLM = ("vllm-cpu-bf16", "vllm-cpu-w8a8")

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
)
GROWTH_BOUND = 1.2
"""What a longer context adds, in copies of its KV bytes."""


class Verdict(Struct, frozen=True, kw_only=True):
    """``ratio`` of our milliseconds to the best peer's; smaller is better."""

    what: str
    ours: str
    peer: str
    ratio: float
    bound: float

    @property
    def met(self) -> bool:
        """Whether the goal is reached."""
        return self.ratio <= self.bound


def judge(cells: Sequence[Cell], grown: Sequence[Growth]) -> list[Verdict]:
    """Return a verdict for every goal whose figures are there."""
    verdicts = [found for goal in GOALS if (found := _judge(goal, cells)) is not None]
    for growth in grown:
        verdicts.append(
            Verdict(
                what=f"{growth.short.label} to {growth.long.tokens:,}",
                ours=growth.engine,
                peer="memory copy",
                ratio=growth.ratio,
                bound=GROWTH_BOUND,
            )
        )
    return verdicts


def _judge(goal: Goal, cells: Sequence[Cell]) -> Verdict | None:
    def fits(cell: Cell) -> bool:
        shape = cell.shape
        return (shape.kind, shape.batch) == (goal.kind, goal.batch) and goal.tokens in (
            None,
            shape.tokens,
        )

    mine = [cell for cell in cells if fits(cell) and cell.engine == goal.ours]
    if not mine:
        return None
    own = min(mine, key=lambda cell: cell.shape.tokens)
    others = [c for c in cells if c.shape == own.shape and c.engine in goal.peers]
    if not others:
        return None
    best = min(others, key=lambda cell: cell.median)
    return Verdict(
        what=own.shape.label,
        ours=goal.ours,
        peer=best.engine,
        ratio=own.median / best.median,
        bound=goal.bound,
    )


def verdict_rows(verdicts: Sequence[Verdict]) -> Rows:
    """Return the goals as a table."""
    body = [
        [v.what, v.ours, v.peer, f"{v.ratio:.2f}", f"{v.bound:.2f}", "yes" if v.met else "no"]
        for v in verdicts
    ]
    return [["figure", "ours", "against", "ratio", "at most", "met"], *body]


def ratio_rows(cells: Sequence[Cell], shapes: Sequence[Shape], names: Sequence[str]) -> Rows:
    """Return our time over each peer's, one row per pair, one column per shape."""
    ours = [name for name in names if name.startswith("diptych-")]
    peers = [name for name in names if name not in ours]
    at = {(cell.engine, cell.shape): cell.median for cell in cells}
    body = []
    for own in ours:
        for peer in peers:
            row = [f"{own} / {peer}"]
            for shape in shapes:
                mine, theirs = at.get((own, shape)), at.get((peer, shape))
                row.append("-" if mine is None or theirs is None else f"{mine / theirs:.2f}")
            body.append(row)
    return [["ms / ms", *(shape.label for shape in shapes)], *body]
