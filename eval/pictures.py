"""Which pictures a report shows and what is in them. Each function returns the lines that show them on the page."""

from collections.abc import Callable, Sequence
from pathlib import Path

from . import plots
from .run_files import Measurement, RunFile, unique
from .statistics import (
    Estimate,
    acceptance_by_depth,
    acceptance_by_source,
    draft_size_over_rounds,
    speedups_by_category,
    tokens_per_forward_by_category,
    tokens_per_second,
)


def speed_pictures(run: RunFile, batch_size: int, measured: Sequence[Measurement], folder: Path) -> list[str]:
    """Speed-up, and tokens per forward, by category and method."""
    lines = []
    speedups = speedups_by_category(measured)
    if any(speedups.values()):
        caption = f"Speed-up over plain decoding, batch size {batch_size}"
        path, line = _place(folder, run, f"speedup-{batch_size}", caption)
        plots.dots_by_category(path, caption, "speed-up", speedups)
        lines.append(line)
    rates = tokens_per_forward_by_category(measured)
    if any(rates.values()):
        points = {
            category: {method: Estimate(rate, None, None, 0) for method, rate in by_method.items()}
            for category, by_method in rates.items()
        }
        caption = f"Tokens per target forward, batch size {batch_size}"
        path, line = _place(folder, run, f"tokens-per-forward-{batch_size}", caption)
        plots.dots_by_category(path, caption, "tokens a forward", points)
        lines.append(line)
    return lines


def draft_pictures(run: RunFile, batch_size: int, measured: Sequence[Measurement], folder: Path) -> list[str]:
    """What became of the drafts: acceptance by depth and by source, draft size over the rounds."""
    lines = []
    if depths := _by_method(measured, acceptance_by_depth):
        caption = f"Acceptance by depth, batch size {batch_size}"
        path, line = _place(folder, run, f"acceptance-by-depth-{batch_size}", caption)
        plots.lines_by_method(path, caption, "depth in the draft", "accepted / drafted", depths)
        lines.append(line)
    if sources := _by_method(measured, acceptance_by_source):
        caption = f"Acceptance by source, batch size {batch_size}"
        path, line = _place(folder, run, f"acceptance-by-source-{batch_size}", caption)
        plots.acceptance_by_source(path, caption, sources)
        lines.append(line)
    if sizes := _by_method(measured, draft_size_over_rounds):
        caption = f"Draft size over the rounds, batch size {batch_size}"
        path, line = _place(folder, run, f"draft-size-{batch_size}", caption)
        plots.lines_by_method(path, caption, "round", "drafted tokens, mean", sizes)
        lines.append(line)
    return lines


def machine_pictures(run: RunFile, folder: Path) -> list[str]:
    """Throughput against batch size, where there are several, and what a forward costs."""
    lines = []
    rates: dict[str, dict[int, float]] = {method: {} for method in run.methods}
    for batch_size in run.batch_sizes:
        measured = run.usable(batch_size)
        for method in run.methods:
            rate = tokens_per_second([m for m in measured if m.method == method])
            if rate is not None:
                rates[method][batch_size] = rate
    rates = {method: points for method, points in rates.items() if len(points) > 1}
    if rates:
        caption = "Throughput against batch size"
        path, line = _place(folder, run, "throughput", caption)
        plots.lines_by_method(path, caption, "batch size", "tokens/s", rates, log2=True)
        lines.append(line)
    if run.cost_curve:
        caption = "What a forward costs on this machine"
        path, line = _place(folder, run, "cost-curve", caption)
        plots.cost_curve(path, caption, run.cost_curve)
        lines.append(line)
    return lines


def _by_method(measured: Sequence[Measurement], statistic: Callable[[Sequence[Measurement]], dict]) -> dict[str, dict]:
    """The statistic of each method that has one."""
    found = {
        method: statistic([m for m in measured if m.method == method]) for method in unique(m.method for m in measured)
    }
    return {method: value for method, value in found.items() if value}


def _place(folder: Path, run: RunFile, name: str, caption: str) -> tuple[Path, str]:
    file = f"{run.path.stem}-{name}.png"
    return folder / file, f"![{caption}]({file})"
