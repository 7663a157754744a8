"""``diptych bench codecs``: size, speed and damage of every KV codec on a real model."""

import platform
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from msgspec import Struct
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from shared.engine.engine import Engine
from shared.engine.model_files import resolve_model
from shared.errors import BadConfig, ResourceMissing
from shared.kv.codecs.frame import CodecName
from shared.kv.codecs.planner import CodecFigures, break_even
from shared.kv.codecs.registry import CODEC_NAMES, make_codec
from shared.precision import Precision
from tools.bench.codecs_quality import Continuations, Difference, compare
from tools.bench.terminal import print_table

_BLOCK_SIZE = 16


class Plan(Struct, frozen=True, kw_only=True):
    """``texts`` prompts of ``prompt`` tokens, each read on for ``positions`` tokens.

    ``chunk`` tokens are encoded at a time; each is timed by the fastest of
    ``passes``, which on a busy machine leaves out most of what others took.
    """

    model: str
    precision: Precision
    texts: int
    prompt: int
    positions: int
    chunk: int
    threads: int
    passes: int = 5


class CodecRow(Struct, frozen=True, kw_only=True):
    """Figures and damage of one codec; rates are raw bytes per second."""

    figures: CodecFigures
    difference: Difference
    break_even_rate: float
    break_even_rate_overlapped: float


class CodecReport(Struct, frozen=True, kw_only=True):
    """What was measured, where, and the rows."""

    plan: Plan
    machine: str
    torch: str
    rows: tuple[CodecRow, ...]


def default_text() -> str:
    """Return the Python language reference as the interpreter ships it for ``help()``.

    Raises:
        ResourceMissing: this Python comes without it.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ResourceMissing("this Python ships no help texts; give a --text FILE") from error
    return "\n\n".join(topics[name] for name in sorted(topics))


def measure_codecs(plan: Plan, text: str, names: Sequence[CodecName]) -> CodecReport:
    """Measure the codecs on ``text``, cut into prompts.

    Raises:
        BadConfig: the text is too short, or the chunk does not consist of whole blocks.
    """
    if plan.chunk < 1 or plan.chunk % _BLOCK_SIZE:
        raise BadConfig(f"--chunk is {plan.chunk}, must be a multiple of {_BLOCK_SIZE}")
    model_dir = resolve_model(plan.model)
    tokens = AutoTokenizer.from_pretrained(model_dir).encode(text)
    length = plan.prompt + plan.positions
    if len(tokens) < plan.texts * length:
        raise BadConfig(f"the text has {len(tokens)} tokens, {plan.texts * length} are needed")
    stride = len(tokens) // plan.texts
    texts = [tokens[i * stride : i * stride + length] for i in range(plan.texts)]
    engine = Engine.load(
        model_dir,
        precision=plan.precision,
        block_size=_BLOCK_SIZE,
        max_model_len=length,
        threads=plan.threads,
    )
    continuations = Continuations(engine, texts, plan.prompt, plan.chunk)
    try:
        rows = _measure(engine, continuations, names, plan.passes)
    finally:
        continuations.close()
    return CodecReport(
        plan=plan, machine=platform.platform(), torch=str(torch.__version__), rows=tuple(rows)
    )


def _measure(
    engine: Engine, continuations: Continuations, names: Sequence[CodecName], passes: int
) -> list[CodecRow]:
    continuations.transfer(make_codec("none", engine.layout))
    reference = continuations.continue_texts()
    rows = []
    for name in names:
        codec = make_codec(name, engine.layout)
        transfers = [continuations.transfer(codec) for _ in range(passes)]
        encoding, decoding = np.minimum.reduce([t.seconds for t in transfers]).sum(axis=0)
        figures = CodecFigures(
            codec=name,
            ratio=transfers[0].raw_bytes / transfers[0].encoded_bytes,
            encode_rate=transfers[0].raw_bytes / float(encoding),
            decode_rate=transfers[0].raw_bytes / float(decoding),
        )
        rows.append(
            CodecRow(
                figures=figures,
                difference=compare(reference, continuations.continue_texts()),
                break_even_rate=break_even(figures, "encode+decode"),
                break_even_rate_overlapped=break_even(figures, "overlapped"),
            )
        )
    return rows


def render_table(report: CodecReport) -> Table:
    """Return the rows for a terminal."""
    plan = report.plan
    table = Table(
        title=f"KV codecs on {plan.model}, {plan.precision}, {plan.texts} x {plan.prompt} tokens "
        f"in chunks of {plan.chunk}, {plan.threads} thread(s)",
        caption="pays below: link rate under which a hand-over gets faster, in turn / overlapped",
    )
    for heading in ("codec", "ratio", "encode GB/s", "decode GB/s", "top-1", "KL mean", "KL max"):
        table.add_column(heading, justify="left" if heading == "codec" else "right")
    table.add_column("pays below MB/s", justify="right")
    for row in report.rows:
        figures, difference = row.figures, row.difference
        table.add_row(
            figures.codec,
            f"{figures.ratio:.2f}",
            f"{figures.encode_rate / 1e9:.3f}",
            f"{figures.decode_rate / 1e9:.3f}",
            f"{difference.top1:.1%}",
            f"{difference.kl_mean:.4f}",
            f"{difference.kl_max:.4f}",
            f"{row.break_even_rate / 1e6:.0f} / {row.break_even_rate_overlapped / 1e6:.0f}",
        )
    return table


def bench_codecs(
    plan: Plan, text_file: Path | None, names: str, out: Path | None, console: Console
) -> None:
    """Measure, print the table and write JSON where asked.

    Raises:
        BadConfig: an unknown codec name, or a text that cannot be read or is too short.
    """
    chosen = tuple(name for name in CODEC_NAMES if name in names.split(","))
    unknown = set(names.split(",")) - set(CODEC_NAMES)
    if unknown:
        raise BadConfig(f"no codec {sorted(unknown)[0]!r}, only {', '.join(CODEC_NAMES)}")
    try:
        text = default_text() if text_file is None else text_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadConfig(f"cannot read the text {text_file}: {error}") from error
    report = measure_codecs(plan, text, chosen)
    print_table(render_table(report), console)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
        console.print(f"written to {out}")
