"""How each drafter's tokens look, wherever they are shown."""

from dataclasses import dataclass
from itertools import chain, count

from ..states import SpecStates
from ..token_tree import names_of

# Okabe and Ito's palette, which colour-blind readers can tell apart (https://jfly.uni-koeln.de/color/). The blue is
# lighter, to be read on black, too; the colours that are hard to see on white come last.
COLOURS = ("#2288CC", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# Five each beside six colours: thirty drafters before two look alike.
TERMINAL_CUES = ("underline", "bold", "italic", "bold underline", "italic underline")
UNDERLINES = ("solid", "dashed", "dotted", "double", "wavy")
BRACKETS = ("⟦⟧", "⟪⟫", "⟮⟯", "⦃⦄", "⦗⦘")
# look the same in every picture; those that often meet have different colours
KNOWN_SOURCES = (
    "assistant", "prompt_lookup", "history", "recycling", "answer_tail", "draft_tail", "prompt_fill", "stock",
)  # fmt: skip


@dataclass(frozen=True)
class SourceStyle:
    """
    Args:
        colour (`str`): As `#RRGGBB`.
        terminal_cue (`str`): A style of rich that tells the drafter without colour.
        underline (`str`): A `text-decoration-style` of CSS that does.
        brackets (`str`): An opening and a closing one, for output that has no styles at all.
    """

    colour: str
    terminal_cue: str
    underline: str
    brackets: str


def styles_of(states: SpecStates) -> dict[str, SourceStyle]:
    """Source -> how it looks; unknown ones by order of appearance. A token of several looks like the first of them."""
    sources = list(states.drafted_by_source)
    places = {source: KNOWN_SOURCES.index(source) for source in sources if source in KNOWN_SOURCES}
    taken = {place % len(COLOURS) for place in places.values()}
    free = chain((place for place in range(len(COLOURS)) if place not in taken), count(len(KNOWN_SOURCES)))
    return {source: _style(places[source] if source in places else next(free)) for source in sources}


def _style(place: int) -> SourceStyle:
    return SourceStyle(
        COLOURS[place % len(COLOURS)],
        TERMINAL_CUES[place % len(TERMINAL_CUES)],
        UNDERLINES[place % len(UNDERLINES)],
        BRACKETS[place % len(BRACKETS)],
    )


def note_on_sharing(states: SpecStates) -> str | None:
    """What a legend must say if several sources proposed the same tokens."""
    sources = {source for sequence in states for spec_round in sequence for source in spec_round.sources}
    if all(len(names_of(source)) == 1 for source in sources):
        return None
    return "Several sources often draft the same token: it counts for each of them, and looks like the first."
