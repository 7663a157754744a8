"""The table, the JSON and the page of ``diptych bench transfer``."""

import os
from pathlib import Path
from typing import get_args

from msgspec import Struct
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig

from shared.engine.model_files import resolve_model
from shared.errors import BadConfig
from shared.kv.codecs.frame import CodecName
from shared.kv.layout import KvLayout, LayerKv
from tools.bench.page import Rows, machine, now, processor, render_page, write_files
from tools.bench.plots import grouped_bars
from tools.bench.terminal import print_table
from tools.bench.transfer import measure
from tools.bench.transfer_device import measure_devices
from tools.bench.transfer_plan import TransferPlan, TransferRow
from tools.slow_link.shaping import LinkProfile

_LEAST_RATE = 0.001
"""Gbit/s: a chunk of 8 MiB takes a minute, which is the patience of all sockets."""
_HEADER = ["path", "codec", "tokens", "MB", "on the wire", "at once ms", "GB/s", "of reference"]
_LINK = "of the link"
_HEADER += ["visible ms", "without pipeline", "hidden", "of none", "CPU ms"]
_EXPLANATION = (
    "At once: all KV of the prompt. Reference: memcpy (on a GPU: a copy within it) for ipc and "
    "nixl, two ZeroMQ sockets that send as many bytes out of as much memory and drop them for "
    "host; measured in turn with each row. Of the link: bytes on the wire per second, over those "
    "that the simulated link lets through. "
    "Visible: from the end of the paced prefill to the arrival of its KV, with layers announced "
    "while it runs; without pipeline: announced at its end. Hidden: the share of the latter "
    "that the former spares. Of none: without pipeline, over the same with plain bytes. GB/s of "
    "a codec count the raw bytes."
)


class TransferReport(Struct, frozen=True, kw_only=True):
    """One measurement and what it was made on."""

    made_at: str
    machine: str
    load: float
    plan: TransferPlan
    rows: list[TransferRow]


def model_layout(model: str, block_size: int) -> KvLayout:
    """Return the bf16 layout of a model's KV from its config, without its weights."""
    config = AutoConfig.from_pretrained(resolve_model(model))
    heads = int(config.num_key_value_heads)
    dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    layer = LayerKv(heads, dim, dim)
    layers = (layer,) * int(config.num_hidden_layers)
    return KvLayout(dtype="bf16", block_size=block_size, layers=layers)


def parse_lengths(text: str) -> tuple[int, ...]:
    """Read ``128,2048``. Raises ``BadConfig``."""
    try:
        lengths = tuple(int(part) for part in text.split(","))
    except ValueError:
        lengths = ()
    if not lengths or min(lengths) < 1:
        raise BadConfig(f"--tokens wants numbers such as 128,2048, not {text!r}")
    return lengths


def parse_codecs(text: str) -> tuple[CodecName, ...]:
    """Read ``none,int8``; ``none`` is always there, and first. Raises ``BadConfig``."""
    known: tuple[CodecName, ...] = get_args(CodecName)
    wanted = {part.strip() for part in text.split(",")}
    unknown = wanted - set(known)
    if unknown:
        raise BadConfig(f"no codec {sorted(unknown)[0]!r}, only {', '.join(known)}")
    return ("none", *(name for name in known if name in wanted and name != "none"))


def link_profile(rate: float, delay: float, loss: float) -> LinkProfile | None:
    """Return a link of Gbit/s, ms and percent; None if all are 0. Raises ``BadConfig``."""
    if not (rate or delay or loss):
        return None
    if 0 < rate < _LEAST_RATE:
        raise BadConfig(f"--rate is {_LEAST_RATE:g} Gbit/s or more, or 0 for no limit")
    return LinkProfile(rate=rate * 1e9 / 8, delay=delay / 1e3, loss=loss / 100)


def run_bench(plan: TransferPlan, out: Path | None, console: Console) -> int:
    """Measure, print, write. Returns the exit code.

    Raises:
        BadConfig: such a device cannot be measured, or not so.
        ResourceMissing: a device, its libraries or memory are missing.
    """
    with console.status("measuring") as status:
        run = measure if plan.device == "cpu" else measure_devices
        rows = run(plan, lambda what: status.update(f"measuring {what}"))
    report = TransferReport(
        made_at=now(),
        machine=f"{processor()}, {machine()}",
        load=os.getloadavg()[0],
        plan=plan,
        rows=rows,
    )
    print_table(table(rows), console)
    console.print(", ".join(facts(report)), soft_wrap=not console.is_terminal)
    if out is not None:
        as_json, as_html = write_files(report, render_html(report), out)
        console.print(f"written to {as_json} and {as_html}", soft_wrap=True)
    return 0


def facts(report: TransferReport) -> list[str]:
    """Return what the figures hold for."""
    plan = report.plan
    said = [
        report.made_at,
        report.machine,
        f"load {report.load:.1f}",
        f"chunks of {plan.chunk_bytes >> 10} KiB",
        f"{plan.slots} slots",
        f"prefill paced at {plan.prefill_rate:g} tokens/s",
        "every byte compared",
    ]
    if plan.device != "cpu":
        said.append(f"KV on {plan.device}")
    if plan.link is not None:
        rate = f"{plan.link.rate * 8 / 1e9:g} Gbit/s" if plan.link.rate else "no limit"
        delay, loss = 1e3 * plan.link.delay, 100 * plan.link.loss
        said.append(f"simulated link: {rate}, {delay:g} ms one way, {loss:g} % lost")
    return said


def table_rows(rows: list[TransferRow]) -> Rows:
    """Return header and cells; the share of the link where there is one with a limit."""
    body = [
        [
            row.path,
            row.codec,
            f"{row.tokens:,}",
            f"{row.bytes / 1e6:.1f}",
            f"{row.wire / 1e6:.1f}",
            f"{1e3 * row.seconds:.1f}",
            f"{row.rate / 1e9:.2f}",
            f"{100 * row.share:.0f} % of {row.reference / 1e9:.2f}",
            f"{1e3 * row.visible:.1f}",
            f"{1e3 * row.visible_off:.1f}",
            f"{100 * row.overlap:.0f} %",
            f"{100 * row.of_plain:.0f} %",
            f"{1e3 * row.cpu_seconds:.1f}",
        ]
        for row in rows
    ]
    if not any(row.of_link is not None for row in rows):
        return [_HEADER, *body]
    at = _HEADER.index("of reference") + 1
    for cells, row in zip(body, rows, strict=True):
        cells.insert(at, "" if row.of_link is None else f"{100 * row.of_link:.0f} %")
    return [[*_HEADER[:at], _LINK, *_HEADER[at:]], *body]


def table(rows: list[TransferRow]) -> Table:
    """Return all rows for the terminal."""
    header, *body = table_rows(rows)
    shown = Table(box=None, padding=(0, 1))
    for name in header:
        shown.add_column(name, justify="right")
    for cells in body:
        shown.add_row(*cells)
    return shown


def render_html(report: TransferReport) -> str:
    """Return the page; it loads nothing from anywhere."""
    lengths = [f"{tokens:,}" for tokens in report.plan.lengths]
    by_name = {
        f"{path} {codec}": [r for r in report.rows if (r.path, r.codec) == (path, codec)]
        for path, codec in report.plan.movers
    }
    rates = {name: [row.rate / 1e9 for row in rows] for name, rows in by_name.items()}
    visible = {name: [1e3 * row.visible for row in rows] for name, rows in by_name.items()}
    off = {name: [1e3 * row.visible_off for row in rows] for name, rows in by_name.items()}
    shares = {name: [100 * row.share for row in rows] for name, rows in by_name.items()}
    return render_page(
        "How fast KV moves",
        facts(report),
        [(table_rows(report.rows), _EXPLANATION)],
        [],
        [
            grouped_bars("GB/s by tokens", lengths, rates, logarithmic=True),
            grouped_bars("Percent of the reference by tokens", lengths, shares),
            grouped_bars("Visible ms by tokens, pipelined", lengths, visible),
            grouped_bars("Visible ms by tokens, without pipeline", lengths, off, logarithmic=True),
        ],
    )
