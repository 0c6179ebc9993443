"""Charts of what became of the drafts."""

import io
import math
from collections import Counter

from ..states import SpecStates
from .palette import COLOURS, styles_of

try:
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("Charts need matplotlib: `pip install matplotlib`.") from error

WIDTH, HEIGHT = 4.8, 3.2  # inches
ACCEPTED = COLOURS[0]
DRAFTED = "#A9AFB6"
MOST_STEPS = 60  # more rounds are averaged in groups
MOST_LABELLED = 10  # bars with room for a number each
LONGEST_NAME = 28  # characters


def plot(states: SpecStates) -> dict[str, Figure]:
    """
    Returns:
        `dict[str, Figure]`: `"acceptance_by_depth"`, `"acceptance_by_source"` and `"draft_size"`. They belong to no
        backend: show one in a notebook by leaving it as the last value of a cell, or `figure.savefig(...)` it.
    """
    return draw(states, "black")


def draw(states: SpecStates, ink: str) -> dict[str, Figure]:
    """The figures of [`plot`] with texts and axes in another colour."""
    return {
        "acceptance_by_depth": acceptance_by_depth(states, ink),
        "acceptance_by_source": acceptance_by_source(states, ink),
        "draft_size": draft_size(states, ink),
    }


def as_svg(figure: Figure, salt: str) -> str:
    """The figure as an SVG file, with its texts as texts. The same figure and salt give the same file."""
    file = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=metadata)
    return file.getvalue()


def acceptance_by_depth(states: SpecStates, ink: str) -> Figure:
    """A bar for each depth: of the rounds that drafted so deep, the share that accepted a token there."""
    figure, panel = _panel("Acceptance by depth", ink)
    shares = states.acceptance_by_depth
    if not shares:
        return _nothing(figure, panel, ink)
    panel.bar(list(shares), list(shares.values()), width=0.7, color=ACCEPTED)
    if len(shares) <= MOST_LABELLED:
        rounds = Counter(depth for sequence in states for spec_round in sequence for depth in set(spec_round.depths))
        for depth, share in shares.items():
            text = f"{share:.0%}\nof {rounds[depth]:,}"
            panel.text(depth, share + 0.02, text, ha="center", va="bottom", fontsize=7.5, color=ink)
    panel.set_xlim(0.4, max(shares) + 0.6)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.set_xlabel("depth in the draft, in tokens")
    panel.set_ylabel("rounds that accepted a token there")
    panel.set_ylim(0, 1.18)  # room for the numbers over a full bar
    _shares(panel.yaxis)
    return figure


def acceptance_by_source(states: SpecStates, ink: str) -> Figure:
    """A bar for each drafter: the share of its drafted tokens that was accepted."""
    shares, drafted = states.acceptance_by_source, states.drafted_by_source
    figure, panel = _panel("Acceptance by source", ink, height=min(HEIGHT, 1.1 + 0.42 * max(len(shares), 1)))
    if not shares:
        return _nothing(figure, panel, ink)
    styles = styles_of(states)
    for place, (source, share) in enumerate(shares.items()):
        panel.barh(place, share, color=styles[source].colour, height=0.6)
        panel.text(share + 0.015, place, f"{share:.0%} of {drafted[source]:,}", va="center", fontsize=9, color=ink)
    names = [name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…" for name in shares]
    # names are whatever a drafter calls itself, dollars included
    panel.set_yticks(range(len(names)), names, parse_math=False)
    panel.set_ylim(len(names) - 0.5, -0.5)
    panel.set_xlim(0, 1.35)  # room for the numbers behind a full bar
    panel.set_xlabel("accepted, of the drafted tokens")
    _shares(panel.xaxis)
    return figure


def draft_size(states: SpecStates, ink: str) -> Figure:
    """A step for each round, or for several: how many tokens were drafted, and how many of them accepted."""
    figure, panel = _panel("Draft size over the rounds", ink)
    sizes, rounds_a_step = mean_sizes(states)
    if not any(drafted for drafted, _ in sizes):
        return _nothing(figure, panel, ink)
    drafted, accepted = zip(*sizes, strict=True)
    edges = [0.5 + step * rounds_a_step for step in range(1 + len(sizes))]
    panel.stairs(drafted, edges, fill=True, color=DRAFTED, label="drafted")
    panel.stairs(accepted, edges, fill=True, color=ACCEPTED, label="of these accepted")
    panel.set_xlim(edges[0], edges[-1])
    panel.set_ylim(0, 1.05 * max(drafted))
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=max(drafted) >= 3))
    panel.set_xlabel("round" if rounds_a_step == 1 else f"round, {rounds_a_step:,} in a step")
    averaged = rounds_a_step > 1 or len(states) > 1
    panel.set_ylabel("tokens a round and row, mean" if averaged else "tokens a round")
    figure.legend(loc="outside lower center", ncols=2, frameon=False, labelcolor=ink)
    return figure


def mean_sizes(states: SpecStates) -> tuple[list[tuple[float, float]], int]:
    """
    Returns:
        `tuple(list[tuple[float, float]], int)`: For each group of consecutive rounds, the mean numbers of drafted and
        of accepted tokens of a round and row; and how many rounds are in a group. The first group begins with round 1,
        as the prefill verifies nothing.
    """
    rounds = [spec_round for sequence in states for spec_round in sequence if spec_round.index > 0]
    if not rounds:
        return [], 1
    last = max(spec_round.index for spec_round in rounds)
    size = math.ceil(last / MOST_STEPS)
    groups: list[list[tuple[int, int]]] = [[] for _ in range(math.ceil(last / size))]
    for spec_round in rounds:
        groups[(spec_round.index - 1) // size].append((len(spec_round.token_ids), spec_round.num_accepted))
    return [
        (sum(d for d, _ in pairs) / len(pairs), sum(a for _, a in pairs) / len(pairs)) if pairs else (0.0, 0.0)
        for pairs in groups
    ], size


# ---------------------------------------------------------------------- the parts


def _panel(title: str, ink: str, height: float = HEIGHT) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    panel = figure.subplots()
    panel.set_title(title, loc="left", fontsize=11, color=ink)
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[:].set_color(ink)
    panel.tick_params(colors=ink, labelsize=9)
    for axis in (panel.xaxis, panel.yaxis):
        axis.label.set_color(ink)
        axis.label.set_fontsize(9)
    return figure, panel


def _shares(axis) -> None:
    axis.set_ticks([0, 0.25, 0.5, 0.75, 1])
    axis.set_major_formatter(PercentFormatter(1, decimals=0))


def _nothing(figure: Figure, panel: Axes, ink: str) -> Figure:
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_ticks([])
    panel.text(0.5, 0.5, "nothing was drafted", transform=panel.transAxes, ha="center", color=ink)
    return figure
