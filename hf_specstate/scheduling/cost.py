"""What rounds cost on this machine, measured from the rounds themselves."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

RATE = 0.3  # at which costs follow what is seen, at least
LEAP = 0.5  # most by which one forward counts as slower or faster than expected, as a logarithm
QUIET = 0.15  # surprises up to here are luck; beyond, the machine has changed its speed, and all widths with it
STALE = 24  # rounds after which the cost of a width is worth looking at again
FIRST_TIME = 1.5  # times what a forward should take at most, from which a first one is not believed
OVERHEAD_RATE = 0.1


class Place(NamedTuple):
    """Where costs hold: one number of rows, on one kind of machine."""

    rows: int
    device: str
    dtype: str
    threads: int
    few_rows: bool
    fixed_slots: bool


# what an enabled model's rounds have cost; it goes when the model goes
_remembered: "WeakKeyDictionary[PreTrainedModel, dict[Place, tuple[dict[int, float], float]]]" = WeakKeyDictionary()


class RoundCost:
    """
    Seconds of a target forward as a function of its width (slots of each row), for one number of rows, and of all that
    a round does beside it. Every width has a running mean of its own, in which no single forward counts much; surprises
    in a row move all other widths too, since the context has grown or the machine has changed its speed. Nothing is
    assumed about the curve except that more tokens never take less time: where means say otherwise, or are missing,
    neighbours are averaged or connected, and beyond the widest the cost grows in proportion.

    Args:
        seconds (`Mapping[int, float]`, *optional*): By width, of earlier generations.
        overhead (`float`, *optional*): Seconds of a round beside its forward.
    """

    def __init__(self, seconds: Mapping[int, float] | None = None, overhead: float = 0.0):
        self.overhead = overhead
        self._round = 0
        # earlier generations may have run at another speed: what they say is soon stale
        self._widths = {width: _Width(math.log(value), 2, -STALE // 2) for width, value in (seconds or {}).items()}
        self._last_leap = 0.0  # by how much the last forward was a surprise
        self._curve: list[float] = []
        self._measured: dict[int, float] | None = None

    def observe(self, width: int, forward_seconds: float, other_seconds: float) -> None:
        """
        Learns from a round.

        Args:
            width (`int`): Slots of each row in the forward.
            forward_seconds, other_seconds (`float`): What the forward took, and the rest of the round.
        """
        seen = math.log(max(forward_seconds, 1e-9))
        if not self._widths:
            self.overhead = other_seconds
        known = self._widths.setdefault(width, _Width(seen))
        surprise = min(max(seen - known.mean, -LEAP), LEAP)
        leap = math.copysign(max(abs(surprise) - QUIET, 0.0), surprise)
        if leap * self._last_leap > 0:  # one alone is a hiccup
            for other in self._widths.values():
                other.mean += 0.0 if other is known else RATE * leap
        self._last_leap = leap
        known.count += 1
        # the first forward of a width may be slow because it is the first
        known.mean = min(seen, known.mean) if known.count == 2 else known.mean + max(RATE, 1 / known.count) * surprise
        self._round += 1
        known.last_round = self._round
        rate = OVERHEAD_RATE if other_seconds < 2 * self.overhead else OVERHEAD_RATE / 4  # an outlier, most likely
        self.overhead += rate * (other_seconds - self.overhead)
        self._curve, self._measured = [], None

    @property
    def measured(self) -> dict[int, float]:
        """
        Seconds by width, as measured: without first forwards that took much longer than the same tokens one by one (for
        compilation, say).
        """
        if self._measured is None:
            seconds = {width: math.exp(self._widths[width].mean) for width in sorted(self._widths)}
            sure = [width for width in seconds if self._widths[width].count > 1]
            most = FIRST_TIME * seconds[sure[0]] / sure[0] if sure else math.inf
            self._measured = {
                width: value for width, value in seconds.items() if width in sure or value <= most * width
            }
        return self._measured

    @property
    def remembered(self) -> dict[int, float]:
        """What is worth keeping of it: seconds of widths that were seen more than once."""
        return {width: value for width, value in self.measured.items() if self._widths[width].count > 1}

    def age(self, width: int) -> float:
        """Rounds since a forward was so wide; infinite before the second one."""
        known = self._widths.get(width)
        return math.inf if known is None or known.count < 2 else self._round - known.last_round

    def curve(self, longest: int) -> list[float]:
        """
        Returns:
            `list[float]` of length `longest + 1`: Seconds of a forward by width, never falling; entry 0 is of no use.
            All zero before the first round.
        """
        if len(self._curve) <= longest:
            # of two that contradict each other, the one that was seen more and later is right
            points = self.measured
            widths = [self._widths[width] for width in points]
            weights = [min(known.count, 5) * 0.5 ** ((self._round - known.last_round) / STALE) for known in widths]
            self._curve = _through(points, weights, longest)
        return self._curve


@dataclass
class _Width:
    """
    Args:
        mean (`float`): Running mean of the logarithm of seconds.
        count (`int`): Of forwards.
        last_round (`int`): When the last one was made.
    """

    mean: float
    count: int = 0
    last_round: int = 0


def _through(points: dict[int, float], weights: Sequence[float], longest: int) -> list[float]:
    if not points:
        return [0.0] * (longest + 1)
    widths = list(points)
    values = rising(list(points.values()), weights)
    curve, place = [], 0
    for width in range(longest + 1):
        while place < len(widths) - 1 and widths[place + 1] <= width:
            place += 1
        here, value = widths[place], values[place]
        if width <= here:
            curve.append(value)
        elif place == len(widths) - 1:
            curve.append(value * width / here)
        else:
            share = (width - here) / (widths[place + 1] - here)
            curve.append(value + share * (values[place + 1] - value))
    return curve


def rising(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The non-decreasing sequence that is nearest to `values` (isotonic regression by pooling adjacent violators)."""
    pools: list[tuple[float, float, int]] = []  # (mean, weight, members)
    for value, weight in zip(values, weights, strict=True):
        members = 1
        while pools and pools[-1][0] > value:
            mean, heavy, count = pools.pop()
            value = (mean * heavy + value * weight) / (heavy + weight)
            weight, members = heavy + weight, members + count
        pools.append((value, weight, members))
    return [mean for mean, _, members in pools for _ in range(members)]


def place_of(model: PreTrainedModel, rows: int, few_rows: bool, fixed_slots: bool) -> Place:
    """Where the costs of `model` hold, with so many rows, faster products and a static cache."""
    threads = torch.get_num_threads() if model.device.type == "cpu" else 0
    device = model.device.type  # and the kind of it; by its number, each rank would have another
    if device in ("cuda", "xpu"):
        device += f" {torch.get_device_module(device).get_device_name(model.device)}"
    return Place(rows, device, str(model.dtype), threads, few_rows, fixed_slots)


def recall_cost(model: PreTrainedModel, place: Place) -> RoundCost:
    """A copy of what is known about `model`, from generations that have ended."""
    return RoundCost(*_remembered.get(model, {}).get(place, ({}, 0.0)))


def remember_cost(model: PreTrainedModel, place: Place, cost: RoundCost) -> None:
    """Keeps what a generation has learned for the model's next one."""
    _remembered.setdefault(model, {})[place] = (cost.remembered, cost.overhead)
