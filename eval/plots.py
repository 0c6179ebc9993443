"""
The pictures of a report. Every method gets the colour of its kind, and lines of many methods get a panel each, with
the others in grey behind them, so that no picture needs more than four colours.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from .run_files import BASELINE, CostPoint
from .statistics import Estimate

# Okabe and Ito's palette, which colour-blind readers can tell apart (https://jfly.uni-koeln.de/color/)
KIND_COLOURS = {"plain": "#000000", "stock": "#E69F00", "this package": "#0072B2", "peer": "#009E73"}
LINE_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
LINE_STYLES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P")
OTHERS = "#D0D0D0"
PEERS = ("dejavuu", "economize")  # packages whose methods are named after them
MOST_TICKS = 8
DOTS_A_INCH = 130

Series = Mapping[str, Mapping[int, float]]  # method -> x -> y


def kind_of(method: str) -> str:
    """Whose a method is, by its name: one of `KIND_COLOURS`."""
    if method == BASELINE:
        return "plain"
    if method.startswith("stock"):
        return "stock"
    return "peer" if method.startswith(PEERS) else "this package"


def dots_by_category(path: Path, title: str, x_label: str, values: Mapping[str, Mapping[str, Estimate]]) -> None:
    """
    A panel for each category, a line in it for each method, with the confidence interval where there is one; 1.0 is
    marked.

    Args:
        path (`Path`), title (`str`), x_label (`str`): Of the picture.
        values (`dict[str, dict[str, Estimate]]`): By category and method.
    """
    methods = list(dict.fromkeys(method for by_method in values.values() for method in by_method))
    columns = min(4, len(values))
    figure, panels = _panels(len(values), columns, width=2.6, height=0.6 + 0.24 * len(methods), extra_width=1.6)
    for panel, (category, by_method) in zip(panels, values.items(), strict=True):
        for place, method in enumerate(methods):
            estimate = by_method.get(method)
            if estimate is None:
                continue
            colour = KIND_COLOURS[kind_of(method)]
            if estimate.low is not None and estimate.high is not None:
                panel.plot([estimate.low, estimate.high], [place, place], color=colour, linewidth=1.5)
            panel.plot(estimate.value, place, "o", color=colour, markersize=5)
        panel.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
        panel.set_title(category.replace("_", " "), fontsize=10)
        panel.set_yticks(range(len(methods)), methods)
        panel.set_ylim(len(methods) - 0.5, -0.5)
        panel.grid(color="#EEEEEE")
        panel.set_axisbelow(True)
    _share(panels, columns, x_label)
    _legend_of_kinds(figure, methods)
    _save(figure, path, title)


def lines_by_method(path: Path, title: str, x_label: str, y_label: str, series: Series, log2: bool = False) -> None:
    """A panel for each method with its line in colour and the other methods' in grey."""
    columns = min(4, len(series))
    figure, panels = _panels(len(series), columns, width=2.4, height=1.8, extra_width=0.6)
    for panel, (method, points) in zip(panels, series.items(), strict=True):
        for other in series.values():
            panel.plot(list(other), list(other.values()), color=OTHERS, linewidth=1)
        colour = KIND_COLOURS[kind_of(method)]
        panel.plot(list(points), list(points.values()), color=colour, linewidth=1.8, marker="o", markersize=3)
        panel.set_title(method, fontsize=9)
        panel.grid(color="#EEEEEE")
        panel.set_axisbelow(True)
        if log2:
            _log2(panel, sorted({x for points in series.values() for x in points}))
        else:
            panel.xaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    _from_zero(panels, series.values())
    _share(panels, columns, x_label, y_label)
    others = [Line2D([], [], color=OTHERS, label="the other methods")] if len(series) > 1 else []
    _legend_of_kinds(figure, list(series), *others)
    _save(figure, path, title)


def acceptance_by_source(path: Path, title: str, counts: Mapping[str, Mapping[str, tuple[int, int]]]) -> None:
    """
    A bar for each source of each method: the share of its drafted tokens that was accepted, with the counts.

    Args:
        counts (`dict[str, dict[str, tuple[int, int]]]`): Drafted and accepted tokens by method and source.
    """
    bars = [(method, source, *pair) for method, sources in counts.items() for source, pair in sources.items()]
    figure = Figure(figsize=(7.5, 1.1 + 0.3 * len(bars)), layout="constrained")
    panel = figure.subplots()
    for place, (method, _, drafted, accepted) in enumerate(bars):
        share = accepted / drafted if drafted else 0.0
        panel.barh(place, share, color=KIND_COLOURS[kind_of(method)], height=0.65)
        panel.text(share + 0.01, place, f"{share:.0%} of {drafted:,}", va="center", fontsize=8)
    panel.set_yticks(range(len(bars)), [f"{method}: {source}" for method, source, _, _ in bars])
    panel.set_ylim(len(bars) - 0.5, -0.5)
    panel.set_xlim(0, 1.18)  # room for the numbers behind a full bar
    panel.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0 %", "25 %", "50 %", "75 %", "100 %"])
    panel.set_xlabel("accepted / drafted tokens")
    _legend_of_kinds(figure, list(counts))
    _save(figure, path, title)


def cost_curve(path: Path, title: str, points: Sequence[CostPoint]) -> None:
    """Time of a forward against the tokens in a row, relative to one token in one row, a line for each batch size."""
    figure = Figure(figsize=(6.5, 4), layout="constrained")
    panel = figure.subplots()
    unit = next((p.seconds for p in points if (p.rows, p.tokens) == (1, 1)), min(p.seconds for p in points))
    for place, rows in enumerate(sorted({p.rows for p in points})):
        curve = sorted((p.tokens, p.seconds / unit) for p in points if p.rows == rows)
        panel.plot(
            *zip(*curve, strict=True),
            color=LINE_COLOURS[place % len(LINE_COLOURS)],
            linestyle=LINE_STYLES[place % len(LINE_STYLES)],
            marker=MARKERS[place % len(MARKERS)],
            markersize=4,
            label=f"{rows} row" + "s" * (rows > 1),
        )
    _log2(panel, sorted({p.tokens for p in points}))
    panel.set_ylim(bottom=0)
    panel.set_xlabel("tokens a row in one forward")
    panel.set_ylabel(f"time, relative to 1 token in 1 row ({1e3 * unit:.3g} ms)")
    panel.grid(color="#EEEEEE")
    panel.legend(frameon=False)
    _save(figure, path, title)


def lines_by_setting(path: Path, title: str, x_label: str, y_label: str, panels_of: Mapping[str, Series]) -> None:
    """A panel for each key of `panels_of`, in it one line for each setting, told apart by colour, dashes and marker."""
    settings = list(dict.fromkeys(name for series in panels_of.values() for name in series))
    styles: dict[str, dict[str, Any]] = {
        name: dict(
            color=LINE_COLOURS[place % len(LINE_COLOURS)],
            linestyle=LINE_STYLES[place // len(LINE_COLOURS) % len(LINE_STYLES)],
            marker=MARKERS[place % len(MARKERS)],
        )
        for place, name in enumerate(settings)
    }
    columns = min(4, len(panels_of))
    figure, panels = _panels(len(panels_of), columns, width=2.8, height=2.4, extra_width=0.6)
    for panel, (name, series) in zip(panels, panels_of.items(), strict=True):
        for setting, points in series.items():
            panel.plot(list(points), list(points.values()), markersize=4, **styles[setting])
        panel.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
        panel.set_title(name, fontsize=10)
        panel.grid(color="#EEEEEE")
        panel.set_axisbelow(True)
        panel.set_xticks(sorted({x for points in series.values() for x in points}))
    _from_zero(panels, [points for series in panels_of.values() for points in series.values()])
    _share(panels, columns, x_label, y_label)
    handles = [Line2D([], [], label=name, markersize=4, **styles[name]) for name in settings]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)), frameon=False, fontsize=9)
    _save(figure, path, title)


# ---------------------------------------------------------------------- the parts


def _panels(count: int, columns: int, width: float, height: float, extra_width: float) -> tuple[Figure, list[Axes]]:
    """`count` panels of `width` x `height` inches on common axes; `extra_width` is for the labels on the left."""
    rows = math.ceil(count / columns)
    size = (max(columns * width + extra_width, 4.5), rows * (height + 0.45) + 0.9)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten().tolist()
    for panel in grid[count:]:
        panel.remove()
    return figure, grid[:count]


def _share(panels: Sequence[Axes], columns: int, x_label: str, y_label: str | None = None) -> None:
    """Axis labels at the outer panels only."""
    for place, panel in enumerate(panels):
        if place + columns >= len(panels):
            panel.set_xlabel(x_label, fontsize=9)
            panel.tick_params(labelbottom=True)
        if place % columns == 0 and y_label is not None:
            panel.set_ylabel(y_label, fontsize=9)
        panel.tick_params(labelsize=8)


def _from_zero(panels: Sequence[Axes], lines: Iterable[Mapping[int, float]]) -> None:
    """One vertical range for all panels, which share their axes."""
    panels[0].set_ylim(0, 1.08 * max(y for points in lines for y in points.values()) or 1.0)


def _log2(panel: Axes, ticks: Sequence[int]) -> None:
    """A logarithmic axis whose ticks are the measured values, or, if there are too many for that, powers of two."""
    panel.set_xscale("log", base=2)
    if len(ticks) > MOST_TICKS:
        ticks = [2**power for power in range(math.ceil(math.log2(ticks[0])), math.floor(math.log2(ticks[-1])) + 1)]
    panel.xaxis.set_major_locator(FixedLocator(ticks))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _legend_of_kinds(figure: Figure, methods: Sequence[str], *more: Line2D) -> None:
    kinds = {kind_of(method) for method in methods}
    if len(kinds) == 1 and not more:
        return
    handles = [
        Line2D([], [], color=colour, marker="o", label=kind) for kind, colour in KIND_COLOURS.items() if kind in kinds
    ]
    handles += more
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)


def _save(figure: Figure, path: Path, title: str) -> None:
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=DOTS_A_INCH, metadata={"Software": ""})  # the same numbers give the same file
