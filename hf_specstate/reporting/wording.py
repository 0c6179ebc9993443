"""Numbers in words, the same in the table, in the terminal and on the page."""

import math

from ..draft_statistics import DraftStatistics
from ..states import SpecSequence, SpecStates

MISSING = "–"
ENDINGS = {
    "eos": "by itself",
    "stop_string": "at a stop string",
    "criterion": "by a stopping criterion",
    "length": "at the length limit",
}


def percent(share: float) -> str:
    return MISSING if math.isnan(share) else f"{share:.0%}"


def decimal(value: float) -> str:
    return MISSING if math.isnan(value) else f"{value:.2f}"


def duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.01 else f"{1e3 * seconds:.1f} ms"


def counted(number: int, noun: str) -> str:
    """The number and its noun: `1 token`, `2 tokens`."""
    return f"{number:,} {noun}" + "s" * (number != 1)


def ending(stop_reason: str | None) -> str:
    """How a row ended, to be read after "ended"."""
    return MISSING if stop_reason is None else ENDINGS.get(stop_reason, stop_reason)


def accepted(statistics: DraftStatistics) -> str:
    """What became of the drafts: `84 of 132 (64%)`."""
    if not statistics.num_drafted:
        return MISSING
    share = percent(statistics.acceptance_rate)
    return f"{statistics.num_accepted:,} of {statistics.num_drafted:,} ({share})"


def summary(statistics: DraftStatistics) -> str:
    """One line of numbers about a row, or about several."""
    parts = [f"{counted(statistics.num_tokens, 'token')} in {counted(statistics.num_forwards, 'forward')}"]
    if not math.isnan(statistics.mean_tokens_per_forward):
        parts.append(f"{decimal(statistics.mean_tokens_per_forward)} per forward after the prefill")
    if statistics.num_drafted:
        parts.append(f"{accepted(statistics)} drafted tokens accepted")
    else:
        parts.append("nothing drafted")
    if isinstance(statistics, SpecSequence):
        parts.append("not ended" if statistics.stop_reason is None else f"ended {ending(statistics.stop_reason)}")
        if statistics.seconds:
            parts.append(duration(statistics.seconds))
    return ", ".join(parts)


def left_out(states: SpecStates) -> str | None:
    """What must be said if a record is not complete."""
    if not states.num_left_out:
        return None
    return f"The logits of {counted(states.num_left_out, 'forward')} were left out, as `record_max_bytes` was reached."
