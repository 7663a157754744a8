"""``diptych bench engine --device cuda``: table and JSON of ``roofline``."""

import json
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from shared.device.names import capability_problem
from shared.device.open import open_device
from shared.engine.device.load import choose_kernels
from shared.errors import BadConfig
from tools.bench.engine.roofline import SHAPES, Line, Roof, Work, measure, measure_roof
from tools.bench.terminal import print_table


def bench_on_device(
    name: str, model: str, work: Work, out: Path, as_json: bool, console: Console
) -> int:
    """Measure a model of random weights on a device. Returns the exit code.

    Raises:
        BadConfig: ``model`` is none of the random ones, or the device does not compute in fp8.
        ResourceMissing: the device, its libraries or memory are missing.
    """
    shape = SHAPES.get(model)
    if shape is None:
        raise BadConfig(f"--device {name} measures random weights: --model {' or '.join(SHAPES)}")
    device = open_device(name)
    kernels, attention = choose_kernels(device.place)
    facts = device.facts()
    problem = capability_problem(facts.capability, work.precision, work.kv_dtype)
    if problem is not None:
        raise BadConfig(problem)
    roof = measure_roof(device, work.precision)
    lines = measure(device, kernels, shape, work, roof)
    report = {
        "device": msgspec.to_builtins(facts),
        "attention": attention,
        "model": model,
        "precision": work.precision,
        "kv_dtype": work.kv_dtype,
        "roof": msgspec.to_builtins(roof),
        "lines": msgspec.to_builtins(lines),
    }
    formats = f"weights {work.precision}, KV {work.kv_dtype}"
    place = out.with_name(out.name + ".json")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    title = f"{model}, {formats} on {facts.name}, {attention}"
    print_table(table_of(title, roof, lines), console)
    console.print(str(place), soft_wrap=True, highlight=False)
    if as_json:
        print(place.read_text(encoding="utf-8"), end="")
    return 0


def refuse_options(precision: str | None, kv_dtype: str | None, sampling: str) -> None:
    """Raise ``BadConfig`` where something else is asked for than what is measured on a GPU."""
    for option, given, measured in (
        ("--precision", precision, ("bf16", "fp8")),
        ("--kv-dtype", kv_dtype, ("bf16", "fp8")),
        ("--sampling", sampling, ("greedy",)),
    ):
        if given is not None and given not in measured:
            raise BadConfig(
                f"on a GPU steps of {' or '.join(measured)} are measured: drop {option} {given} "
                "or --device"
            )


def table_of(title: str, roof: Roof, lines: list[Line]) -> Table:
    """Return the figures for people."""
    table = Table(title=title)
    for column in ("step", "ms", "of what the device can do"):
        table.add_column(column, justify="left" if column == "step" else "right")
    rates = {
        "copy": f"{roof.copy / 1e12:.2f} TB/s copied",
        "multiply": f"{roof.multiply / 1e12:.0f} TFLOP/s",
    }
    for line in lines:
        share = f"{100 * line.fraction:.0f} % of {rates[line.bound]}"
        table.add_row(line.label, f"{line.milliseconds:.2f}", share)
    return table
