"""The texts of tokens as they are shown."""

from typing import NamedTuple

from ..states import SpecSequence
from ..token_tree import names_of

# A terminal obeys control characters and a page drops them: show their pictures, or that there is one.
_CONTROLS = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\t\n"}
_CONTROLS |= {0x7F: "␡"} | dict.fromkeys(range(0x80, 0xA0), "\ufffd")
_SPACES = str.maketrans({" ": "␣", "\n": "⏎", "\t": "⇥"})


class Piece(NamedTuple):
    """A new token: its text, and who drafted it: the first of several, None if the target added it."""

    text: str
    source: str | None


def visible(text: str) -> str:
    """The text without control characters other than line breaks and tabs."""
    return text.translate(_CONTROLS)


def label(token: int, texts: dict[int, str] | None) -> str:
    """A token by itself, on one line and with its spaces visible; its id if it has no text."""
    return visible((texts or {}).get(token, "").translate(_SPACES)) or unknown(token)


def unknown(token: int) -> str:
    """A token whose text is not known."""
    return f"‹{token}›"


def pieces_by_round(sequence: SpecSequence) -> list[list[Piece]]:
    """For each round, the tokens that it committed; ids in place of texts if the states were never decoded."""
    if sequence.text_pieces is None:
        texts = iter([unknown(token) for token in sequence.token_ids])
    else:
        texts = iter([visible(text) for text in sequence.text_pieces])
    rounds = []
    for spec_round in sequence:
        sources: list[str | None] = [names_of(spec_round.sources[node])[0] for node in spec_round.accepted]
        sources += [] if spec_round.added_token_id is None else [None]
        rounds.append([Piece(next(texts), source) for source in sources])
    return rounds
