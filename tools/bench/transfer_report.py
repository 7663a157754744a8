"""The table and the JSON of ``diptych bench transfer``."""

import os
import platform
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig

from shared.engine.model_files import resolve_model
from shared.errors import BadConfig
from shared.kv.layout import KvLayout, LayerKv
from tools.bench.transfer import TransferPlan, TransferRow, measure


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


def run_bench(plan: TransferPlan, out: Path | None, console: Console) -> int:
    """Measure, print, write. Returns the exit code."""
    with console.status("measuring") as status:
        rows = measure(plan, lambda what: status.update(f"measuring {what}"))
    console.print(table(rows))
    console.print(
        f"chunks of {plan.chunk_bytes >> 10} KiB, {plan.slots} slots, prefill paced at "
        f"{plan.prefill_rate:g} tokens/s, every byte compared; {os.cpu_count()} CPUs, "
        f"load {os.getloadavg()[0]:.1f}"
    )
    if out is not None:
        report = {
            "machine": {"cpus": os.cpu_count(), "system": platform.platform()},
            "plan": msgspec.to_builtins(plan),
            "rows": msgspec.to_builtins(rows),
        }
        out.parent.mkdir(parents=True, exist_ok=True)
        path = out.with_suffix(".json")
        path.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
        console.print(f"wrote {path}")
    return 0


def table(rows: list[TransferRow]) -> Table:
    """Return all rows for the terminal."""
    shown = Table(box=None, padding=(0, 1))
    for name in ("path", "tokens", "MB", "at once ms", "GB/s", "of reference"):
        shown.add_column(name, justify="right", no_wrap=True)
    for name in ("visible ms", "without pipeline", "hidden", "CPU ms"):
        shown.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        shown.add_row(
            row.path,
            str(row.tokens),
            f"{row.bytes / 1e6:.1f}",
            f"{1e3 * row.seconds:.1f}",
            f"{row.rate / 1e9:.2f}",
            f"{100 * row.share:.0f} % of {row.reference / 1e9:.2f}",
            f"{1e3 * row.visible:.1f}",
            f"{1e3 * row.visible_off:.1f}",
            f"{100 * row.overlap:.0f} %",
            f"{1e3 * row.cpu_seconds:.1f}",
        )
    return shown
