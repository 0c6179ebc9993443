"""A page that shows speculative states in any browser, and the same page inside of a notebook."""

from html import escape
from importlib import resources
from importlib.util import find_spec
from string import Template

from ..states import SpecSequence, SpecStates
from .page_data import page_data
from .palette import SourceStyle, note_on_sharing, styles_of
from .pieces import Piece, pieces_by_round
from .wording import MISSING, accepted, counted, decimal, duration, ending, left_out, summary


def to_html(states: SpecStates) -> str:
    """
    Returns:
        `str`: A page that needs no network and no other file. It has charts if matplotlib is installed.
    """
    if not find_spec("matplotlib"):
        return _page(states, "")
    from .charts import charts

    return _page(states, charts(states))


def to_embedded_html(states: SpecStates) -> str:
    """
    Returns:
        `str`: The page in a frame, where its styles and its script do not meet those of a notebook.
    """
    page = to_html(states)
    style = "width: 100%; height: 40rem; border: 1px solid #8888; border-radius: 6px"
    frame = f'<iframe title="Speculative states" sandbox="allow-scripts" style="{style}" srcdoc="{escape(page)}">'
    return frame + "</iframe>"


def _page(states: SpecStates, charts: str) -> str:
    template = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    styles = styles_of(states)
    rows = [_row(row, sequence, styles, len(states) > 1) for row, sequence in enumerate(states)]
    # One pass: what is filled in is not looked at again, so a text may look like a placeholder.
    return Template(template).substitute(
        title=f"{counted(states.num_tokens, 'token')} in {counted(states.num_forwards, 'forward')}",
        source_styles="\n".join(
            f".s{place} {{ --c: {style.colour}; --u: {style.underline}; }}"
            for place, style in enumerate(styles.values())
        ),
        numbers=_numbers(states),
        notes=_notes(states),
        legend=_legend(states, styles),
        sharing=f'<p class="hint">{escape(note)}</p>' if (note := note_on_sharing(states)) else "",
        rows="\n".join(rows) or "<p>No rows.</p>",
        charts=f'<section class="charts" id="charts" aria-label="Charts">{charts}</section>' if charts else "",
        charts_link='<a href="#charts">Charts</a>' if charts else "",
        data=page_data(states),
    )


def _numbers(states: SpecStates) -> str:
    """The headline: what is said of a row goes with the row if there are several."""
    numbers = {
        "new tokens": f"{states.num_tokens:,}",
        "target forwards": f"{states.num_forwards:,}",
        "tokens per forward after the prefill": decimal(states.mean_tokens_per_forward),
        "drafted tokens accepted": accepted(states),
    }
    if len(states) == 1:
        sequence = states[0]
        numbers["ended"] = ending(sequence.stop_reason)
        numbers["time"] = duration(sequence.seconds) if sequence.seconds else MISSING
    else:
        numbers = {"rows": f"{len(states):,}", **numbers}
    return "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in numbers.items())


def _notes(states: SpecStates) -> str:
    unknown = any(sequence.text_pieces is None for sequence in states)
    notes = [
        "The texts of the tokens are not known here, so their ids are shown." if unknown else None,
        left_out(states),
        None if find_spec("matplotlib") else "Install matplotlib to have charts here.",
    ]
    return "".join(f"<p>{escape(note)}</p>" for note in notes if note)


def _legend(states: SpecStates, styles: dict[str, SourceStyle]) -> str:
    entries = [f"<li>the target <small>{states.num_tokens - states.num_accepted:,}</small></li>"]
    taken = states.accepted_by_source
    for place, (source, drafted) in enumerate(states.drafted_by_source.items()):
        entries.append(
            f'<li><span class="d s{place}">{escape(source)}</span> '
            f"<small>{taken[source]:,} of {drafted:,} drafted</small></li>"
        )
    return "".join(entries)


def _row(row: int, sequence: SpecSequence, styles: dict[str, SourceStyle], several: bool) -> str:
    place_of = {source: place for place, source in enumerate(styles)}
    rounds = "".join(_round(number, pieces, place_of) for number, pieces in enumerate(pieces_by_round(sequence)))
    head = f"<h2>Row {row}</h2><p class=numbers>{escape(summary(sequence))}</p>" if several else ""
    name = f"Text of row {row}" if several else "Text"
    # lang="": the text may be in any language
    return (
        f'<section class="row">{head}'
        f'<div class="text" role="group" aria-label="{name}, round by round: arrow keys" data-row="{row}" '
        f'lang="" dir="auto">{rounds}</div></section>'
    )


def _round(number: int, pieces: list[Piece], place_of: dict[str, int]) -> str:
    """The tokens of a round. The first round of a row is where the keyboard gets in."""
    tokens = "".join(_token(piece, place_of) for piece in pieces)
    focus = "" if number else ' tabindex="0"'
    return f'<span class="r" data-r="{number}"{focus}>{tokens}</span>'


def _token(piece: Piece, place_of: dict[str, int]) -> str:
    classes = [] if piece.source is None else ["d", f"s{place_of[piece.source]}"]
    if not piece.text:  # part of a character: the page shows a mark that can be pointed at
        classes.append("e")
    text = escape(piece.text).replace("\n", "<b>\n</b>")
    return f'<span class="{" ".join(classes)}">{text}</span>' if classes else f"<span>{text}</span>"
