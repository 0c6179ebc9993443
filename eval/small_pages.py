"""The one-page results of the smaller measurements: the command, then what it found."""

import sys
from collections.abc import Sequence
from pathlib import Path

from .config import without_folders


def publish(name: str, lines: Sequence[str], out: Path | None, note: str = "") -> None:
    """
    Prints a page, and writes it into the folder `out` if there is one.

    Args:
        name (`str`): Of the module in `eval` that was run, and of the file.
        lines (`list[str]`): Markdown.
        out (`Path`, *optional*): Made if it is not there.
        note (`str`, *optional*): Put behind the command.
    """
    command = " ".join([f"python -m eval.{name}", *map(without_folders, sys.argv[1:])])
    text = "\n".join([f"`{command}`{note}", "", *lines, ""])
    print(text)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{name}.md").write_text(text, encoding="utf-8")
