"""Charts of a report as inline SVG."""

from collections.abc import Callable

import pygal
from pygal.style import Style

from tools.bench.summary import LevelSummary, Spread

_STYLE = Style(
    background="transparent",
    plot_background="transparent",
    font_family="system-ui, sans-serif",
    colors=("#2f6fdd", "#e08a1e", "#c4314b", "#2b9a66", "#7a52c7"),
    title_font_size=18,
    label_font_size=13,
    major_label_font_size=13,
    legend_font_size=13,
)
_PHASES = ("queue", "prefill", "transfer", "kv_transfer", "first_step", "hand_over")


def latency_chart(
    name: str, levels: list[LevelSummary], pick: Callable[[LevelSummary], Spread | None]
) -> str:
    """Return percentiles of one quantity over the concurrency levels."""
    chart = pygal.Line(title=f"{name} (ms)", x_title="clients", **_options())
    chart.x_labels = _labels(levels)
    for percentile in ("p50", "p90", "p99"):
        spreads = [pick(level) for level in levels]
        chart.add(percentile, [None if s is None else getattr(s, percentile) for s in spreads])
    return _svg(chart)


def throughput_chart(levels: list[LevelSummary]) -> str:
    """Return output tokens per second over the concurrency levels."""
    chart = pygal.Bar(title="Output tokens per second", x_title="clients", **_options())
    chart.x_labels = _labels(levels)
    chart.add("tokens/s", [level.output_rate for level in levels])
    return _svg(chart)


def phase_chart(levels: list[LevelSummary]) -> str:
    """Return the median of every phase over the concurrency levels."""
    chart = pygal.Bar(title="Phases, median (ms)", x_title="clients", **_options())
    chart.x_labels = _labels(levels)
    for phase in _PHASES:
        spreads: list[Spread | None] = [getattr(level.phases, phase) for level in levels]
        chart.add(phase.replace("_", " "), [None if s is None else s.p50 for s in spreads])
    return _svg(chart)


def _options() -> dict[str, object]:
    return {
        "style": _STYLE,
        "js": [],
        "height": 340,
        "width": 620,
        "legend_at_bottom": True,
        "min_scale": 4,
        "include_x_axis": True,
        "pretty_print": False,
        "value_formatter": lambda value: f"{value:.1f}",
    }


def _labels(levels: list[LevelSummary]) -> list[str]:
    return [str(level.concurrency) for level in levels]


def _svg(chart: pygal.Line | pygal.Bar) -> str:
    text: str = chart.render(is_unicode=True)
    return text[text.index("<svg") :]
