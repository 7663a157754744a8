"""Parts of every report: where and when, the JSON file, and a page that loads nothing."""

import html
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from shared.cpuinfo import cpuinfo
from shared.errors import ResourceMissing

_CSS = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem;
  padding: 0 1rem; color: #1c2024; background: #fff; }
h1 { font-size: 1.6rem; line-height: 1.25; margin-bottom: .25rem; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
thead th { border-bottom: 2px solid #9aa3ad; }
tbody tr:hover { background: #f4f6f8; }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid #dde1e6; }
th:first-child, td:first-child { text-align: left; white-space: pre; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr));
  gap: 1rem; }
.charts > div { border: 1px solid #dde1e6; border-radius: .5rem; padding: .5rem;
  break-inside: avoid; }
.charts svg { display: block; width: 100%; height: auto; }
.note { color: #5a6169; }
"""


Rows = list[list[str]]
"""Header row and body rows of a table; names come first."""


def now() -> str:
    """Return date, time and offset of this moment."""
    return time.strftime("%Y-%m-%d %H:%M:%S %z")


def machine() -> str:
    """Return the machine in words."""
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores, {platform.machine()}, Linux {platform.release()}"


def processor() -> str:
    """Return the processor's name as the kernel tells it, else the architecture."""
    return cpuinfo("model name") or platform.machine()


def write_files(report: Struct, page: str, base: Path) -> tuple[Path, Path]:
    """Write ``base``.json and ``base``.html and return both.

    Raises:
        ResourceMissing: the place cannot be written to.
    """
    as_json, as_html = base.with_name(f"{base.name}.json"), base.with_name(f"{base.name}.html")
    try:
        base.parent.mkdir(parents=True, exist_ok=True)
        as_json.write_bytes(
            msgspec.json.format(msgspec.json.encode(report, enc_hook=_words)) + b"\n"
        )
        as_html.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ResourceMissing(f"the report cannot go to {base}: {error.strerror}") from error
    return as_json, as_html


def _words(value: object) -> str:
    """Return paths as text: the one thing in reports that JSON does not know."""
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} in a report")


def render_page(
    title: str,
    facts: Sequence[str],
    tables: Sequence[tuple[Rows, str]],
    problems: Sequence[str],
    charts: Sequence[str],
) -> str:
    """Return a page: tables, each with a note below it, what went wrong, and SVG charts."""
    listed = "".join(f"<li>{html.escape(problem)}</li>" for problem in problems)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title><style>{_CSS}</style></head><body>"
        f"<h1>{html.escape(title)}</h1>"
        f"<p class=note>{' &middot; '.join(html.escape(fact) for fact in facts)}</p>"
        + "".join(_table(rows, note) for rows, note in tables)
        + (f"<h2>Errors</h2><ul>{listed}</ul>" if listed else "")
        + f'<div class="charts">{"".join(f"<div>{chart}</div>" for chart in charts)}</div>'
        "</body></html>\n"
    )


def _table(rows: Rows, note: str) -> str:
    header, *body = rows
    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    lines = "".join(
        f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>" for cells in body
    )
    return (
        f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"
        f"<p class=note>{html.escape(note)}</p>"
    )
