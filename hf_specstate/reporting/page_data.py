"""What the page's script knows about every round, as JSON inside the page."""

import json
import math
from collections.abc import Sequence
from typing import Any

from ..states import SpecRound, SpecStates
from ..token_tree import names_of
from .palette import styles_of
from .pieces import label
from .wording import duration, ending

MOST_ALTERNATIVES = 5

# JSON has no need of them outside of strings, and inside they may be escaped; in a page, they could end the script.
_ESCAPED = str.maketrans({character: f"\\u{ord(character):04x}" for character in "<>&"})


def page_data(states: SpecStates) -> str:
    """
    Returns:
        `str`: JSON, safe inside of a `<script>`: `sources`, a list of names; `looks`, for each of them the number of
        its style; `texts`, a text for each token that is known and mentioned; `rows`, for each row a list of rounds,
        see [`_round`].
    """
    sources = list(dict.fromkeys(source for sequence in states for made in sequence for source in made.sources))
    styles = list(styles_of(states))
    looks = [styles.index(names_of(source)[0]) for source in sources]
    place_of = {source: place for place, source in enumerate(sources)}
    rows = [[_round(spec_round, place_of) for spec_round in sequence] for sequence in states]
    known = states.token_texts or {}
    mentioned = sorted({token for rounds in rows for data in rounds for token in _mentioned(data)} & known.keys())
    texts = {token: label(token, known) for token in mentioned}
    data = {
        "sources": [" + ".join(names_of(source)) for source in sources],
        "looks": looks,
        "texts": texts,
        "rows": rows,
    }
    # ASCII: U+2028 and halves of surrogate pairs come out as escapes, too
    return json.dumps(data, allow_nan=False, separators=(",", ":")).translate(_ESCAPED)


def _round(spec_round: SpecRound, place_of: dict[str, int]) -> dict[str, Any]:
    """Short names, as there may be thousands of rounds; what is absent is left out."""
    seconds = (spec_round.draft_seconds, spec_round.verify_seconds, spec_round.other_seconds)
    data = {
        "round": spec_round.index,
        "ids": spec_round.token_ids,
        "parents": spec_round.parents,
        "by": [place_of[source] for source in spec_round.sources],
        "draft": _probabilities(spec_round.draft_logprobs),
        "target": _probabilities(spec_round.target_logprobs),
        "best": spec_round.target_token_ids,
        "taken": spec_round.accepted,
        "added": spec_round.added_token_id,
        "next": _alternatives(spec_round),
        "stop": None if spec_round.stop_reason is None else ending(spec_round.stop_reason),
        "planned": spec_round.num_planned or None,
        "why": None if spec_round.decision is None else spec_round.explain(),
        "rows": spec_round.num_rows,
        "width": spec_round.width,
        "time": [duration(part) for part in seconds] if any(seconds) else None,
    }
    return {name: value for name, value in data.items() if value is not None and value != []}


def _probabilities(logprobs: Sequence[float]) -> list[float | None]:
    """Four digits of them; None where there is none."""
    return [None if math.isnan(logprob) else float(f"{math.exp(logprob):.4g}") for logprob in logprobs]


def _alternatives(spec_round: SpecRound) -> list[list]:
    """The likeliest tokens after the accepted ones, with their probabilities, if they were recorded."""
    if spec_round.top_token_ids is None or spec_round.top_logprobs is None:
        return []
    slot = 1 + spec_round.accepted[-1] if spec_round.accepted else 0
    tokens = spec_round.top_token_ids[slot, :MOST_ALTERNATIVES].tolist()
    logprobs = spec_round.top_logprobs[slot, :MOST_ALTERNATIVES].tolist()
    return [list(pair) for pair in zip(tokens, _probabilities(logprobs), strict=True)]


def _mentioned(data: dict[str, Any]) -> list[int]:
    added = [data["added"]] if "added" in data else []
    return data.get("ids", []) + data.get("best", []) + added + [token for token, _ in data.get("next", [])]
