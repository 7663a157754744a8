"""What is measured and the numbers that come out."""

import statistics
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from shared.errors import BadConfig

Kind = Literal["decode", "prefill", "host"]
SamplingKind = Literal["greedy", "mixed"]

CHUNK = 512
"""Tokens of prompts read at a time before decode is measured."""

_GROWTH = 64
"""Tokens per sequence for which our scheduler keeps blocks."""


class Shape(Struct, frozen=True):
    """A decode step of ``batch`` sequences, each ``tokens`` long, or a prompt of ``tokens``.

    ``host`` is what such a decode step costs besides the model.
    """

    kind: Kind
    batch: int
    tokens: int
    sampling: SamplingKind = "greedy"

    @property
    def label(self) -> str:
        """Name for tables."""
        if self.kind == "prefill":
            return f"prefill {self.tokens:,}"
        mixed = "" if self.sampling == "greedy" else f", {self.sampling}"
        return f"{self.kind} B={self.batch} at {self.tokens:,}{mixed}"


class Plan(Struct, frozen=True, kw_only=True):
    """``rounds``: times that every engine gets its turn; ``steps``: decode steps in a turn.

    ``device``: where all engines run, ``cpu`` or a CUDA device.
    """

    model: str
    shapes: tuple[Shape, ...]
    rounds: int
    steps: int
    cores: tuple[int, ...]
    device: str = "cpu"

    @property
    def widest(self) -> int:
        """Most tokens of a step: a prompt of a turn, a part of those before decode, or a batch."""
        prompts = (shape.tokens for shape in self.shapes if shape.kind == "prefill")
        return max(CHUNK, self.slots, *prompts)

    @property
    def slots(self) -> int:
        """Most sequences at a time."""
        return max(shape.batch for shape in self.shapes)

    @property
    def longest(self) -> int:
        """Most tokens of one sequence, its measured steps and a margin for warm-up included."""
        return max(shape.tokens + self._room(shape) for shape in self.shapes)

    @property
    def pool_tokens(self) -> int:
        """Most tokens of all sequences of a shape together."""
        return max(shape.batch * (shape.tokens + self._room(shape)) for shape in self.shapes)

    def _room(self, shape: Shape) -> int:
        if shape.kind == "prefill":
            return 0
        room = self.steps + 16
        if shape.kind == "host":  # those read first decode while the others are read
            room += _GROWTH + shape.batch * shape.tokens // CHUNK
        return room


class Cell(Struct, frozen=True, kw_only=True):
    """One engine at one shape: median over turns of each turn's median, in milliseconds."""

    engine: str
    shape: Shape
    median: float
    least: float
    most: float
    turns: int

    @property
    def rate(self) -> float:
        """Tokens per second: decoded ones, or prompt tokens read."""
        tokens = self.shape.batch if self.shape.kind == "decode" else self.shape.tokens
        return 1e3 * tokens / self.median


class EngineFacts(Struct, frozen=True, kw_only=True):
    """``load_seconds``: start of the process's load to ready. ``rss``: bytes, see the names.

    ``kv_pool_bytes``, ``kv_token_bytes``, ``kv_dtype`` and ``copy_rate`` (bytes per second of a
    memory copy) are known of Diptych only. ``problem``: why there are no figures, else None.
    """

    name: str
    precision: str
    load_seconds: float | None = None
    loaded_rss: int | None = None
    rss: int | None = None
    kv_dtype: str | None = None
    kv_token_bytes: float | None = None
    kv_pool_bytes: int | None = None
    copy_rate: float | None = None
    problem: str | None = None


def cell(engine: str, shape: Shape, turns: Sequence[Sequence[float]]) -> Cell:
    """Reduce the turns of one engine at one shape; each holds the seconds of its steps."""
    medians = [1e3 * statistics.median(turn) for turn in turns]
    return Cell(
        engine=engine,
        shape=shape,
        median=statistics.median(medians),
        least=min(medians),
        most=max(medians),
        turns=len(medians),
    )


def make_shapes(
    batches: Sequence[int],
    contexts: Sequence[int],
    prompts: Sequence[int],
    samplings: Sequence[SamplingKind] = ("greedy",),
) -> tuple[Shape, ...]:
    """Return every batch at the first context, the smallest batch at all others, and prompts."""
    shapes = []
    for sampling in samplings:
        shapes += [Shape("decode", batch, contexts[0], sampling) for batch in batches]
        shapes += [Shape("decode", min(batches), context, sampling) for context in contexts[1:]]
    return (*shapes, *(Shape("prefill", 1, tokens) for tokens in prompts))


def host_shapes(
    batches: Sequence[int], context: int, samplings: Sequence[SamplingKind]
) -> tuple[Shape, ...]:
    """Return every batch with every sampling, each sequence ``context`` tokens long."""
    return tuple(Shape("host", batch, context, kind) for kind in samplings for batch in batches)


def parse_numbers(option: str, text: str) -> tuple[int, ...]:
    """Read ``1,4,16``. Raises ``BadConfig`` naming the option."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise BadConfig(f"{option} wants numbers such as 1,4,16, not {text!r}")
    return numbers


class Growth(Struct, frozen=True, kw_only=True):
    """What a longer context adds to a step (ms), and what copying its KV bytes would take."""

    engine: str
    short: Shape
    long: Shape
    added: float
    copying: float

    @property
    def ratio(self) -> float:
        """How many times the copy."""
        return self.added / self.copying


def growth(engine: EngineFacts, cells: Sequence[Cell]) -> Growth | None:
    """Compare the longest with the shortest context at one batch, where both are measured."""
    if engine.kv_token_bytes is None or engine.copy_rate is None:
        return None
    mine = [c for c in cells if c.engine == engine.name and c.shape.kind == "decode"]
    mine = [c for c in mine if c.shape.sampling == mine[0].shape.sampling]
    smallest = min((c.shape.batch for c in mine), default=0)
    mine = sorted((c for c in mine if c.shape.batch == smallest), key=lambda c: c.shape.tokens)
    if len(mine) < 2:
        return None
    short, long = mine[0], mine[-1]
    tokens = smallest * (long.shape.tokens - short.shape.tokens)
    return Growth(
        engine=engine.name,
        short=short.shape,
        long=long.shape,
        added=long.median - short.median,
        copying=1e3 * tokens * engine.kv_token_bytes / engine.copy_rate,
    )
