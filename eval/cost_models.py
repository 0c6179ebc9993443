"""What a forward of some tokens in some rows costs: as measured on a machine, or as on machines that we do not have."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import numpy as np

from .run_files import CostPoint

FLAT_TOKENS = 64  # tokens x rows that a GPU computes in the time that it needs to read the weights once


class CostModel(Protocol):
    """
    Args:
        name (`str`): For titles.
        has_seconds (`bool`): Costs are seconds, to which others may be added; otherwise multiples of some unit.
    """

    name: str
    has_seconds: bool

    def cost(self, rows: int, tokens: int) -> float:
        """Of one forward of `tokens` tokens in each of `rows` rows."""
        ...


@dataclass
class GpuFlat:
    """Constant up to `FLAT_TOKENS` tokens in all rows together, where memory is what takes time; then linear."""

    name: str = "gpu-flat"
    has_seconds: bool = False

    def cost(self, rows: int, tokens: int) -> float:
        return max(1.0, rows * tokens / FLAT_TOKENS)


@dataclass
class Steep:
    """Linear in the tokens: no machine on which speculation could gain anything."""

    name: str = "steep"
    has_seconds: bool = False

    def cost(self, rows: int, tokens: int) -> float:
        return float(rows * tokens)


@dataclass
class CpuLike:
    """A processor on which two tokens cost 1.7 times one, and sixteen hardly more; every row adds three tenths."""

    name: str = "cpu-like"
    has_seconds: bool = False

    def cost(self, rows: int, tokens: int) -> float:
        return float(np.interp(tokens, (1, 2, 4, 8, 12, 16, 32), (1, 1.67, 1.86, 1.7, 1.77, 2.06, 2.63))) * (
            0.7 + 0.3 * rows
        )


class Measured:
    """
    The curve of a run, straight between its points and beyond them.

    Args:
        points (`list[CostPoint]`): At least one; of points for the same forward the median counts.
        origin (`str`): Whose they are.

    Raises:
        ValueError: no points.
    """

    name = "measured"
    has_seconds = True

    def __init__(self, points: Sequence[CostPoint], origin: str):
        if not points:
            raise ValueError("`--curve measured` needs a run with a cost curve in it; pass one, or take another curve.")
        self.origin = origin
        seconds: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for point in points:
            seconds[point.rows][point.tokens].append(point.seconds)
        self._curves = {
            rows: {tokens: median(values) for tokens, values in sorted(by_tokens.items())}
            for rows, by_tokens in sorted(seconds.items())
        }

    @property
    def most_rows(self) -> int:
        """Most rows that were measured; more are extrapolated."""
        return max(self._curves)

    def cost(self, rows: int, tokens: int) -> float:
        by_rows = {measured: _line_through(curve, tokens) for measured, curve in self._curves.items()}
        if len(by_rows) == 1:  # nothing is known about other batch sizes: take tokens as tokens, whatever their row
            (measured,) = by_rows
            return _line_through(self._curves[measured], math.ceil(rows * tokens / measured))
        return _line_through(by_rows, rows)


# those that need no measurement
COST_MODELS: dict[str, Callable[[], CostModel]] = {"gpu-flat": GpuFlat, "cpu-like": CpuLike, "steep": Steep}


def _line_through(points: dict[int, float], place: int) -> float:
    """The polyline through `points` at `place`, continued with its outermost pieces, never falling beyond them."""
    xs, ys = list(points), list(points.values())
    if len(xs) > 1 and place > xs[-1]:
        slope = max(0.0, (ys[-1] - ys[-2]) / (xs[-1] - xs[-2]))
        return ys[-1] + slope * (place - xs[-1])
    return float(np.interp(place, xs, ys))
