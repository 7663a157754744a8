"""Charts of a report as inline SVG."""

import io
from collections.abc import Callable

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tools.bench.summary import LevelSummary, Spread

_SIZE = (6.4, 3.6)
_COLOURS = ("#2f6fdd", "#e08a1e", "#c4314b", "#2b9a66", "#7a52c7", "#5a6169")
_PHASES = ("queue", "prefill", "transfer", "kv_transfer", "first_step", "hand_over")
_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


def latency_chart(
    name: str, levels: list[LevelSummary], pick: Callable[[LevelSummary], Spread | None]
) -> str:
    """Return percentiles of one quantity over the concurrency levels."""

    def draw(axes: Axes) -> None:
        for colour, percentile in zip(_COLOURS, ("p50", "p90", "p99"), strict=False):
            values = [_value(pick(level), percentile) for level in levels]
            axes.plot(range(len(levels)), values, "o-", color=colour, label=percentile)

    return _chart(f"{name} (ms)", levels, draw)


def throughput_chart(levels: list[LevelSummary]) -> str:
    """Return output tokens per second over the concurrency levels."""

    def draw(axes: Axes) -> None:
        rates = [level.output_rate for level in levels]
        bars = axes.bar(range(len(levels)), rates, 0.5, color=_COLOURS[0])
        axes.bar_label(bars, fmt="%.0f")

    return _chart("Output tokens per second", levels, draw)


def phase_chart(levels: list[LevelSummary]) -> str:
    """Return the median of every phase over the concurrency levels."""

    def draw(axes: Axes) -> None:
        width = 0.8 / len(_PHASES)
        for number, (colour, phase) in enumerate(zip(_COLOURS, _PHASES, strict=True)):
            values = [_value(getattr(level.phases, phase), "p50") for level in levels]
            places = [at - 0.4 + (number + 0.5) * width for at in range(len(levels))]
            axes.bar(places, values, width, color=colour, label=phase.replace("_", " "))

    return _chart("Phases, median (ms)", levels, draw)


def _value(values: Spread | None, which: str) -> float:
    return float("nan") if values is None else float(getattr(values, which))


def _chart(title: str, levels: list[LevelSummary], draw: Callable[[Axes], None]) -> str:
    return chart(title, "clients", [str(level.concurrency) for level in levels], draw)


def grouped_bars(
    title: str, groups: list[str], bars: dict[str, list[float]], *, logarithmic: bool = False
) -> str:
    """Return a chart of bars, one per name in every group; NaN leaves a gap."""

    def draw(axes: Axes) -> None:
        width = 0.8 / max(len(bars), 1)
        for number, (name, values) in enumerate(bars.items()):
            places = [at - 0.4 + (number + 0.5) * width for at in range(len(groups))]
            colour = _COLOURS[number % len(_COLOURS)]
            axes.bar(places, values, width, color=colour, label=name)
        if logarithmic:
            axes.set_yscale("log")

    return chart(title, "", groups, draw, from_zero=not logarithmic)


def chart(
    title: str,
    below: str,
    ticks: list[str],
    draw: Callable[[Axes], None],
    *,
    from_zero: bool = True,
) -> str:
    """Return what ``draw`` draws over numbered ``ticks``, as SVG."""
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "diptych"}):
        figure = Figure(figsize=_SIZE, layout="constrained")
        axes = figure.subplots()
        draw(axes)
        axes.set_title(title)
        axes.set_xlabel(below)
        axes.set_xticks(range(len(ticks)), ticks)
        if from_zero:
            axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            figure.legend(loc="outside lower center", ncols=3, frameon=False)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata=_METADATA)
    text = out.getvalue()
    return text[text.index("<svg") :]
