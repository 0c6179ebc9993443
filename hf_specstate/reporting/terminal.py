"""The texts in the terminal, coloured by where each token came from."""

from rich.console import Console
from rich.text import Text

from ..states import SpecSequence, SpecStates
from .palette import SourceStyle, note_on_sharing, styles_of
from .pieces import pieces_by_round
from .wording import left_out, summary

Styles = dict[str, SourceStyle]


def show(states: SpecStates, console: Console | None = None) -> None:
    """
    Prints every row's text, who wrote how much of it, and a line of numbers. The target's own tokens are plain; a
    drafter's have a colour and another cue, or brackets around them where the output has no styles.

    Args:
        states ([`SpecStates`]): Decoded; otherwise ids are shown.
        console (`rich.console.Console`, *optional*): Defaults to standard output.
    """
    console = console or Console()
    styles = styles_of(states)
    bracketed = console.color_system is None
    for row, sequence in enumerate(states):
        if len(states) > 1:
            console.rule(Text(f"row {row}"), align="left", style="dim")
        console.print(_text(sequence, styles, bracketed), end="\n\n")
        console.print(_legend(sequence, styles, bracketed))
        console.print(Text(summary(sequence)), end="\n\n" if len(states) > 1 else "\n")
    if len(states) > 1:
        console.rule("all rows", align="left", style="dim")
        console.print(Text(summary(states)))
    for note in (note_on_sharing(states), left_out(states)):
        if note:
            console.print(Text(note))


def _text(sequence: SpecSequence, styles: Styles, bracketed: bool) -> Text:
    text = Text(overflow="fold")
    for pieces in pieces_by_round(sequence):
        runs: list[tuple[str | None, str]] = []
        for piece, source in pieces:
            piece = piece.replace("\n", "⏎\n")
            if runs and runs[-1][0] == source:
                runs[-1] = (source, runs[-1][1] + piece)
            else:
                runs.append((source, piece))
        for source, run in runs:
            text.append_text(_marked(run, source, styles, bracketed))
    return text


def _marked(run: str, source: str | None, styles: Styles, bracketed: bool) -> Text:
    """What one drafter, or the target, wrote in a round. Built without markup: a text may look like it."""
    if source is None:
        return Text(run)
    style = styles[source]
    if bracketed:
        return Text(f"{style.brackets[0]}{run}{style.brackets[1]}")
    return Text(run, style=f"{style.terminal_cue} {style.colour}")


def _legend(sequence: SpecSequence, styles: Styles, bracketed: bool) -> Text:
    legend = Text(f"added by the target: {sequence.num_tokens - sequence.num_accepted:,}")
    accepted = sequence.accepted_by_source
    for place, (source, drafted) in enumerate(sequence.drafted_by_source.items()):
        legend.append("  " if place else "; accepted/drafted: ")
        legend.append_text(_marked(source, source, styles, bracketed))
        legend.append(f" {accepted[source]:,}/{drafted:,}")
    return legend
