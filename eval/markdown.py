"""Markdown."""

from collections.abc import Iterable, Sequence

MISSING = "–"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table whose columns line up in the source too; the first is set left, the others right."""
    cells = [list(head), *[[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    rule = ["-" * max(widths[0], 3), *["-" * max(width - 1, 2) + ":" for width in widths[1:]]]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in cells]
    return ["| " + " | ".join(line) + " |" for line in [lines[0], rule, *lines[1:]]]


def or_missing(value, form: str = "") -> str:
    """`value`, formatted, or a dash."""
    return MISSING if value is None else format(value, form)
