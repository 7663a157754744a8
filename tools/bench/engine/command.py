"""``diptych bench engine``: our engine in the precisions asked for, in turns."""

import itertools
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar, get_args

from rich.console import Console

from shared.device.names import device_problem
from shared.engine.model_files import resolve_model
from shared.errors import BadConfig
from shared.kv.layout import KvDtype
from shared.precision import Precision
from shared.worker.cores import one_of_each_first, physical_cores, read_siblings
from tools.bench.engine.contestant import Launch
from tools.bench.engine.figures import Plan, SamplingKind
from tools.bench.engine.report import (
    EngineReport,
    make_report,
    print_problems,
    render_tables,
    write_report,
)
from tools.bench.engine.rounds import Entry, Race
from tools.bench.terminal import print_table

T = TypeVar("T", bound=str)

ON_CPUS: tuple[Precision, ...] = tuple(name for name in get_args(Precision) if name != "fp8")
FOR_SPEED: tuple[Precision, ...] = tuple(name for name in ON_CPUS if name != "fp32")
"""The precisions that anyone serves for speed."""

_MODULE = "tools.bench.engine.diptych"


def precisions(text: str | None, otherwise: Sequence[Precision]) -> tuple[Precision, ...]:
    """Read `--precision`, None is ``otherwise``. Raises ``BadConfig`` with those there are."""
    return tuple(otherwise) if text is None else _names("--precision", text, get_args(Precision))


def kv_dtypes(text: str | None) -> tuple[KvDtype | None, ...]:
    """Read `--kv-dtype`; None is the precision's own. Raises ``BadConfig`` with those there are."""
    return (None,) if text is None else _names("--kv-dtype", text, get_args(KvDtype))


def formats(
    device: str, precision: str | None, kv_dtype: str | None
) -> tuple[tuple[Precision, ...], tuple[KvDtype | None, ...]]:
    """Read `--precision` and `--kv-dtype` for a device; None is those that are served for speed.

    Raises:
        BadConfig: there is none such, or the device does not have it: that would show late.
    """
    own: tuple[Precision, ...] = FOR_SPEED if device == "cpu" else ("bf16",)
    chosen, kv = precisions(precision, own), kv_dtypes(kv_dtype)
    for weights, rows in itertools.product(chosen, kv):
        problem = device_problem(device, weights, rows)
        if problem is not None:
            raise BadConfig(problem)
    return chosen, kv


def sampling_kinds(text: str) -> tuple[SamplingKind, ...]:
    """Read `--sampling`. Raises ``BadConfig`` with those there are."""
    return _names("--sampling", text, get_args(SamplingKind))


def _names(option: str, text: str, known: tuple[T, ...]) -> tuple[T, ...]:
    """Read names with commas between; they come in the order of ``known``."""
    unknown = [name for name in text.split(",") if name not in known]
    if unknown:
        raise BadConfig(f"{option} may be {', '.join(known)}, with commas between; not {text!r}")
    return tuple(name for name in known if name in text.split(","))


def pick_cores(threads: int | None) -> tuple[int, ...]:
    """Return ``threads`` of the cores this process may use, all of them when None.

    Hardware threads of one core are taken last.

    Raises:
        BadConfig: there are not so many.
    """
    available = os.sched_getaffinity(0)
    if threads is not None and threads > len(available):
        raise BadConfig(f"--threads is {threads}, but there are {len(available)} cores")
    groups = physical_cores(available, read_siblings(available))
    return tuple(sorted(one_of_each_first(groups)[:threads]))


def own_entries(
    plan: Plan, chosen: Sequence[Precision], kv: Sequence[KvDtype | None] = (None,)
) -> list[Entry]:
    """Return one entry per precision and KV dtype; None is the precision's own."""
    options = {
        "model": str(resolve_model(plan.model)),
        "cores": plan.cores,
        "threads": len(plan.cores),
        "slots": plan.slots,
        "tokens": plan.pool_tokens,
        "longest": plan.longest,
        "widest": plan.widest,
        "device": plan.device,
    }
    return [
        Entry(
            launch=Launch(
                name=f"diptych-{precision}" + (f"-kv-{dtype}" if dtype else ""),
                python=sys.executable,
                module=_MODULE,
                options={**options, "precision": precision, "kv_dtype": dtype},
                environment={"OMP_NUM_THREADS": str(len(plan.cores))},
            ),
            precision=precision,
            ours=True,
        )
        for precision in chosen
        for dtype in kv
    ]


def race(plan: Plan, entries: Sequence[Entry], console: Console) -> EngineReport:
    """Measure the entries in turns."""
    load = os.getloadavg()[0]
    engines, cells = Race(plan, console).run(entries)
    return make_report(plan, engines, cells, load)


def bench_engine(
    plan: Plan, entries: Sequence[Entry], out: Path, as_json: bool, console: Console
) -> int:
    """Measure, print tables or JSON, write the report. Returns the exit code.

    Progress and tables go to ``console``, JSON alone to stdout.
    """
    report = race(plan, entries, console)
    page = write_report(report, out)
    for table in render_tables(report):
        print_table(table, console)
    print_problems(report, console)
    console.print(f"{page.with_name(page.stem + '.json')}\n{page}", soft_wrap=True, highlight=False)
    if as_json:
        print(page.with_name(page.stem + ".json").read_text(encoding="utf-8"), end="")
    return 1 if any(facts.problem for facts in report.engines) else 0


def default_output(kind: str) -> Path:
    """Return ``reports/KIND-DATE`` in the working directory."""
    return Path("reports") / time.strftime(f"{kind}-%Y%m%d-%H%M%S")
