"""A short table in plain text: what `print(states)` shows."""

from ..draft_statistics import DraftStatistics
from ..states import SpecSequence, SpecStates
from .wording import MISSING, decimal, left_out, percent

HEADER = ["row", "new tokens", "forwards", "tokens/forward*", "drafted", "accepted", "acceptance", "stopped by"]
MOST_ROWS = 20


def as_table(states: SpecStates) -> str:
    """
    Returns:
        `str`: A line a row, up to `MOST_ROWS` of them, and one for all if there are several.
    """
    if not len(states):
        return "No rows."
    cells = [HEADER, *[_cells(str(row), sequence) for row, sequence in enumerate(states[:MOST_ROWS])]]
    if len(states) > 1:
        cells.append(_cells("all", states))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for line in cells:
        numbers = [cell.rjust(width) for cell, width in zip(line[:-1], widths, strict=False)]
        lines.append("  ".join([*numbers, line[-1]]).rstrip())
    if len(states) > MOST_ROWS:
        lines.insert(-1, f"… {len(states) - MOST_ROWS:,} more")
    lines.append("* tokens that a forward gave a row, the prefill left out")
    if note := left_out(states):
        lines.append(note)
    return "\n".join(lines)


def _cells(name: str, statistics: DraftStatistics) -> list[str]:
    stop_reason = ""
    if isinstance(statistics, SpecSequence):
        stop_reason = statistics.stop_reason or MISSING
    return [
        name,
        f"{statistics.num_tokens:,}",
        f"{statistics.num_forwards:,}",
        decimal(statistics.mean_tokens_per_forward),
        f"{statistics.num_drafted:,}",
        f"{statistics.num_accepted:,}",
        percent(statistics.acceptance_rate),
        stop_reason,
    ]
