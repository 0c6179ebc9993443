"""What rounds cost on this machine, measured from the rounds themselves."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

SAMPLES = 5  # of each width, the last ones; their median counts
LEVEL_RATE = 0.2  # at which the level follows the machine and the growing context
LEAP = 0.4  # most by which one forward counts as slower or faster than expected, as a logarithm
STALE = 24  # rounds after which the cost of a width is worth looking at again
OVERHEAD_RATE = 0.1


class Place(NamedTuple):
    """Where costs hold: one number of rows, on one kind of machine."""

    rows: int
    device: str
    dtype: str
    threads: int


# what an enabled model's rounds have cost; it goes when the model goes
_remembered: "WeakKeyDictionary[PreTrainedModel, dict[Place, tuple[dict[int, float], float]]]" = WeakKeyDictionary()


class RoundCost:
    """
    Seconds of a target forward as a function of its width (slots of each row), for one number of rows, and of all that
    a round does beside it. A width's cost is its *shape*, the median of a few samples relative to a *level* that all
    widths share; the level follows a context that grows and a machine that changes its speed. Nothing is assumed about
    the curve except that more tokens never take less time: where samples say otherwise, or are missing, neighbours are
    averaged or connected, and beyond the widest sample the cost grows in proportion.

    Args:
        seconds (`Mapping[int, float]`, *optional*): By width, of earlier generations.
        overhead (`float`, *optional*): Seconds of a round beside its forward.
    """

    def __init__(self, seconds: Mapping[int, float] | None = None, overhead: float = 0.0):
        self.overhead = overhead
        self._level = math.log(next(iter(seconds.values()))) if seconds else 0.0
        self._round = 0
        # earlier generations may have run at another speed: what they say is soon stale
        self._widths = {
            width: _Width(deque([math.log(value) - self._level], maxlen=SAMPLES), -STALE // 2, is_sure=True)
            for width, value in (seconds or {}).items()
        }
        self._curve: list[float] = []

    def observe(self, width: int, forward_seconds: float, other_seconds: float) -> None:
        """
        Learns from a round.

        Args:
            width (`int`): Slots of each row in the forward.
            forward_seconds, other_seconds (`float`): What the forward took, and the rest of the round.
        """
        seen = math.log(max(forward_seconds, 1e-9))
        if not self._widths:
            self._level, self.overhead = seen, other_seconds
        known = self._widths.get(width)
        if known is None:
            known = self._widths[width] = _Width(deque(maxlen=SAMPLES))
        else:
            surprise = seen - self._level - median_low(known.samples)
            self._level += LEVEL_RATE * min(max(surprise, -LEAP), LEAP)
            known.is_sure = True
        self._round += 1
        known.last_round = self._round
        known.samples.append(seen - self._level)
        rate = OVERHEAD_RATE if other_seconds < 2 * self.overhead else OVERHEAD_RATE / 4  # an outlier, most likely
        self.overhead += rate * (other_seconds - self.overhead)
        self._curve = []

    @property
    def measured(self) -> dict[int, float]:
        """Seconds by width, as measured."""
        return {
            width: math.exp(self._level + median_low(self._widths[width].samples)) for width in sorted(self._widths)
        }

    def age(self, width: int) -> float:
        """Rounds since a forward was so wide; infinite before the second one, as the first may have been an outlier."""
        known = self._widths.get(width)
        return math.inf if known is None or not known.is_sure else self._round - known.last_round

    def curve(self, longest: int) -> list[float]:
        """
        Returns:
            `list[float]` of length `longest + 1`: Seconds of a forward by width, never falling; entry 0 is of no use.
            All zero before the first round.
        """
        if len(self._curve) <= longest:
            weights = [
                len(known.samples) * 0.5 ** ((self._round - known.last_round) / STALE)
                for _, known in sorted(self._widths.items())
            ]
            self._curve = _through(self.measured, weights, longest)
        return self._curve


@dataclass
class _Width:
    """
    Args:
        samples (`deque[float]`): Logarithms of seconds, relative to the level of their time.
        last_round (`int`): When the last one was taken.
        is_sure (`bool`): There was more than one.
    """

    samples: deque[float]
    last_round: int = 0
    is_sure: bool = False


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


def place_of(model: PreTrainedModel, rows: int) -> Place:
    """Where the costs of `model` with so many rows hold."""
    threads = torch.get_num_threads() if model.device.type == "cpu" else 0
    return Place(rows, str(model.device), str(model.dtype), threads)


def recall_cost(model: PreTrainedModel, rows: int) -> RoundCost:
    """A copy of what is known about `model`, from generations that have ended."""
    return RoundCost(*_remembered.get(model, {}).get(place_of(model, rows), ({}, 0.0)))


def remember_cost(model: PreTrainedModel, rows: int, cost: RoundCost) -> None:
    """Keeps what a generation has learned for the model's next one."""
    _remembered.setdefault(model, {})[place_of(model, rows)] = (cost.measured, cost.overhead)
