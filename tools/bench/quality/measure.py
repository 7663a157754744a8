"""Read a text with every precision and KV dtype; compare what each thinks comes next."""

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from msgspec import Struct, structs
from numpy.typing import NDArray
from rich.console import Console
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from shared.engine.model_files import resolve_model
from shared.errors import BadConfig
from shared.kv.layout import KvDtype
from shared.precision import Precision, kv_dtype_for
from tools.bench.codecs_quality import BestTokens, compare
from tools.bench.engine.command import own_entries
from tools.bench.engine.contestant import Contestant
from tools.bench.engine.figures import Plan as EnginePlan
from tools.bench.engine.figures import Shape
from tools.bench.engine.rounds import Entry

TEXT = Path(__file__).resolve().parent.parent / "data" / "prose.txt"
_LOAD_TIMEOUT = 600.0
_TIMEOUT = 3600.0
_STEPS = 16
_CONTEXT = 200


class Plan(Struct, frozen=True, kw_only=True):
    """Up to ``windows`` windows of ``window`` tokens are read, each from its own start."""

    model: str
    window: int
    windows: int
    cores: tuple[int, ...]
    text: Path | None


class Variant(Struct, frozen=True):
    """Weights, and KV: None as they suit the weights."""

    precision: Precision
    kv_dtype: KvDtype | None = None

    @property
    def emulated(self) -> bool:
        """Whether this is a GPU's: its arithmetic is done on the CPU, at no speed of interest."""
        return "fp8" in (self.precision, self.kv_dtype)


REFERENCE = Variant("fp32")


class Loss(Struct, frozen=True, kw_only=True):
    """Against fp32, over all positions: perplexities, share of equal best tokens, mean KL."""

    positions: int
    perplexity: float
    perplexity_change: float
    top1: float
    kl: float


class QualityRow(Struct, frozen=True, kw_only=True):
    """One variant. ``prefill`` reads windows whole, ``decode`` a token at a time.

    ``rss``: bytes after loading. ``decode_ms`` one sequence's step at 200 tokens of context,
    ``prefill_ms`` of one window's length.
    """

    precision: Precision
    kv_dtype: KvDtype
    rss: int
    decode_ms: float
    prefill_ms: float
    prefill: Loss
    decode: Loss

    @property
    def label(self) -> str:
        """Name for charts: that of the precision, where its KV is its own."""
        own = kv_dtype_for(self.precision, None) == self.kv_dtype
        return self.precision if own else f"{self.precision}, KV {self.kv_dtype}"


class Scores(Struct, frozen=True):
    """Log probabilities of the text's own tokens, and the best tokens, per position."""

    logprobs: NDArray[np.float64]
    best: BestTokens


def read_windows(plan: Plan) -> list[list[int]]:
    """Return token ids of the text in windows; what is left at its end is not read.

    Raises:
        BadConfig: the text cannot be read, or is shorter than a window.
    """
    file = plan.text or TEXT
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadConfig(f"cannot read the text {file}: {error}") from error
    tokenizer = Tokenizer.from_file(str(resolve_model(plan.model) / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    count = min(plan.windows, len(ids) // plan.window)
    if count == 0:
        raise BadConfig(f"{file} has {len(ids)} tokens, fewer than a window of {plan.window}")
    return [ids[i * plan.window : (i + 1) * plan.window] for i in range(count)]


def measure(plan: Plan, chosen: Sequence[Variant], console: Console) -> list[QualityRow]:
    """Measure the variants one after the other, fp32 first as it is the reference.

    Raises:
        EngineFailed: one cannot be loaded or run; its log stays where the sentence says.
    """
    windows = read_windows(plan)
    shape = Shape("decode", len(windows), max(plan.window, _CONTEXT))
    engine_plan = EnginePlan(
        model=plan.model, shapes=(shape,), rounds=1, steps=_STEPS, cores=plan.cores
    )
    order = [REFERENCE, *(variant for variant in chosen if variant != REFERENCE)]
    rows = []
    reference: Scores | None = None
    folder = Path(tempfile.mkdtemp(prefix="diptych-quality-"))
    for one in order:
        (entry,) = own_entries(engine_plan, [one.precision], [one.kv_dtype])
        if one.emulated:
            options = {**entry.launch.options, "emulated": True}
            entry = structs.replace(entry, launch=structs.replace(entry.launch, options=options))
        with console.status(f"reading with {entry.launch.name}"):
            row, scores = _measure(one, entry, windows, reference, folder)
        reference = reference or scores
        rows.append(row)
    shutil.rmtree(folder)
    return rows


def _measure(
    variant: Variant,
    entry: Entry,
    windows: list[list[int]],
    reference: Scores | None,
    folder: Path,
) -> tuple[QualityRow, Scores]:
    name = entry.launch.name
    with Contestant(entry.launch, folder / f"{name}.log", _LOAD_TIMEOUT) as engine:
        facts = engine.ask("facts", _TIMEOUT)
        steps = engine.ask("decode", _TIMEOUT, batch=1, context=_CONTEXT, steps=_STEPS)
        prompts = [engine.ask("prefill", _TIMEOUT, tokens=len(windows[0])) for _ in range(3)]
        scores = []
        for chunk in (len(windows[0]), 1):
            out = folder / f"{name}-{chunk}.safetensors"
            engine.ask("score", _TIMEOUT, windows=windows, chunk=chunk, out=str(out))
            scores.append(load_scores(out))
    reference = reference or scores[0]
    row = QualityRow(
        precision=variant.precision,
        kv_dtype=facts["kv_dtype"],
        rss=engine.loaded_rss,
        decode_ms=1e3 * float(np.median(steps)),
        prefill_ms=1e3 * float(np.median(prompts)),
        prefill=loss(reference, scores[0]),
        decode=loss(reference, scores[1]),
    )
    return row, scores[0]


def load_scores(file: Path) -> Scores:
    """Read what the engine's process wrote."""
    arrays = load_file(file)
    return Scores(arrays["logprobs"], BestTokens(arrays["tokens"], arrays["best"]))


def loss(reference: Scores, scores: Scores) -> Loss:
    """Compare two readings of the same text."""
    before, after = (float(np.exp(-s.logprobs.mean())) for s in (reference, scores))
    difference = compare(reference.best, scores.best)
    return Loss(
        positions=difference.positions,
        perplexity=after,
        perplexity_change=after / before - 1,
        top1=difference.top1,
        kl=difference.kl_mean,
    )
