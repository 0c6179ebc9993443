"""What a run's numbers say and how sure they are: paired ratios, their intervals, the machine's noise."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from scipy import stats

from .run_files import BASELINE, Measurement, Question, unique

Value = TypeVar("Value")

CONFIDENCE = 0.95
RESAMPLES = 9999
ALL = "all"  # every category together
MIN_QUESTIONS = 3  # resampling fewer says nothing about other questions
# Spreads of plain decoding beyond which a report warns: on a quiet machine both stay well below.
NOISY_REPEATS = 0.05
NOISY_DRIFT = 0.10


@dataclass
class Estimate:
    """
    Args:
        value (`float`): Geometric mean over the questions.
        low, high (`float`, *optional*): Its confidence interval; None for fewer than `MIN_QUESTIONS` questions.
        questions (`int`): How many there were.
    """

    value: float
    low: float | None
    high: float | None
    questions: int

    def __str__(self) -> str:
        interval = "" if self.low is None else f" ({self.low:.2f}–{self.high:.2f})"
        return f"{self.value:.2f}{interval}"


def paired_speedups(
    measurements: Sequence[Measurement], method: str, baseline: str = BASELINE
) -> dict[Question, float]:
    """
    How many times as many tokens a second `method` gave as `baseline`, for each question that both answered. Only
    measurements of one repeat are compared, as they were made next to each other; repeats are averaged (geometrically).
    """
    rates = {(m.question, m.repeat, m.method): m.tokens_per_second for m in measurements if m.is_usable}
    logs: dict[Question, list[float]] = defaultdict(list)
    for (question, repeat, name), rate in rates.items():
        other = rates.get((question, repeat, baseline))
        if name == method and other is not None:
            logs[question].append(math.log(rate / other))
    return {question: math.exp(float(np.mean(values))) for question, values in logs.items()}


def geometric_mean(ratios: Iterable[float]) -> Estimate | None:
    """The mean of per-question ratios with a bootstrap interval over the questions; None without any."""
    logs = np.log(np.fromiter(ratios, dtype=float))
    if not len(logs):
        return None
    value = float(np.exp(logs.mean()))
    if len(logs) < MIN_QUESTIONS:
        return Estimate(value, None, None, len(logs))
    if np.ptp(logs) == 0:  # BCa is not defined where all values are the same
        return Estimate(value, value, value, len(logs))
    interval = stats.bootstrap(
        (logs,), np.mean, n_resamples=RESAMPLES, confidence_level=CONFIDENCE, method="BCa", rng=0
    ).confidence_interval
    return Estimate(value, float(np.exp(interval.low)), float(np.exp(interval.high)), len(logs))


def by_category(measurements: Sequence[Measurement]) -> dict[str, list[Measurement]]:
    """The measurements of each category, and of all together last if there are several."""
    chosen: dict[str, list[Measurement]] = {}
    for measurement in measurements:
        chosen.setdefault(measurement.category, []).append(measurement)
    return chosen if len(chosen) == 1 else chosen | {ALL: list(measurements)}


def speedups_by_category(measurements: Sequence[Measurement]) -> dict[str, dict[str, Estimate]]:
    """By category and method: the speed-up over plain decoding of the methods that were measured beside it."""
    methods = unique(m.method for m in measurements if m.method != BASELINE)
    found = {
        category: {method: geometric_mean(paired_speedups(chosen, method).values()) for method in methods}
        for category, chosen in by_category(measurements).items()
    }
    return {category: _known(by_method) for category, by_method in found.items()}


def tokens_per_forward_by_category(measurements: Sequence[Measurement]) -> dict[str, dict[str, float]]:
    """By category and method, as far as it was recorded."""
    methods = unique(m.method for m in measurements)
    found = {
        category: {method: tokens_per_forward(m for m in chosen if m.method == method) for method in methods}
        for category, chosen in by_category(measurements).items()
    }
    return {category: _known(by_method) for category, by_method in found.items()}


def _known(values: Mapping[str, Value | None]) -> dict[str, Value]:
    return {name: value for name, value in values.items() if value is not None}


def tokens_per_forward(measurements: Iterable[Measurement]) -> float | None:
    """Tokens that a target forward gave a row, the prefill and its token left out; None where nothing was recorded."""
    tokens = forwards = 0.0
    for turn in (turn for m in measurements for turn in m.turns):
        rate, new = turn.get("tokens_per_forward"), turn["new_tokens"] - 1
        if rate and new > 0:
            tokens += new
            forwards += new / rate
    return tokens / forwards if forwards else None


def tokens_per_second(measurements: Sequence[Measurement]) -> float | None:
    """All new tokens over all seconds."""
    seconds = sum(m.seconds() for m in measurements)
    return sum(m.new_tokens for m in measurements) / seconds if seconds else None


# ---------------------------------------------------------------------- noise


@dataclass
class Noise:
    """
    How steady the machine was, judged by plain decoding.

    Args:
        repeats (`float`, *optional*):
            Standard deviation of the time of one question between repeats, as a fraction; None without repeats.
        drift (`float`, *optional*):
            By how much the slowest third of the run was slower than the fastest, as a fraction; None for short runs.
    """

    repeats: float | None
    drift: float | None

    @property
    def is_known(self) -> bool:
        return self.repeats is not None or self.drift is not None

    @property
    def is_noisy(self) -> bool:
        return (self.repeats or 0.0) > NOISY_REPEATS or (self.drift or 0.0) > NOISY_DRIFT

    def __str__(self) -> str:
        said = [
            "no repeats to compare" if self.repeats is None else f"{self.repeats:.1%} between repeats of one question",
            "too short to see a drift" if self.drift is None else f"{self.drift:.1%} between parts of the run",
        ]
        return "; ".join(said)


def noise(measurements: Sequence[Measurement]) -> Noise:
    """The spread of plain decoding in the measurements of one batch size, which are in the order of the run."""
    plain = [m for m in measurements if m.method == BASELINE and m.is_usable]
    return Noise(_spread_between_repeats(plain), _drift(plain))


def _spread_between_repeats(plain: Sequence[Measurement]) -> float | None:
    times: dict[Question, list[float]] = defaultdict(list)
    for measurement in plain:
        times[measurement.question].append(-math.log(measurement.tokens_per_second))
    repeated = [values for values in times.values() if len(values) > 1]
    if not repeated:
        return None
    squares = sum(float(np.var(values)) * len(values) for values in repeated)
    return math.sqrt(squares / sum(len(values) - 1 for values in repeated))


def _drift(plain: Sequence[Measurement]) -> float | None:
    """Compares thirds of the run by their median time a token, after taking out what a longer context costs."""
    timed = [(_context(m), m.decode_seconds_per_token) for m in plain]
    points = [(context, math.log(seconds)) for context, seconds in timed if seconds]
    if len(points) < 3 * MIN_QUESTIONS:
        return None
    contexts, times = (np.array(values) for values in zip(*points, strict=True))
    slope = stats.theilslopes(times, contexts).slope if np.ptp(contexts) else 0.0
    medians = [float(np.median(part)) for part in np.array_split(times - slope * contexts, 3)]
    return math.exp(max(medians) - min(medians)) - 1


def _context(measurement: Measurement) -> float:
    """Tokens in the cache, on average."""
    return float(np.mean([turn.get("prompt_tokens", 0) + turn["new_tokens"] / 2 for turn in measurement.turns]))


# ---------------------------------------------------------------------- drafts


def acceptance_by_depth(measurements: Iterable[Measurement]) -> dict[int, float]:
    """Accepted / drafted nodes at each depth of the trees, 1 for the tokens right after the last committed one."""
    counts: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for turn in (turn for m in measurements for turn in m.turns):
        for depth, drafted, accepted in turn.get("accepted_by_depth") or []:
            counts[depth][0] += drafted
            counts[depth][1] += accepted
    return {depth: accepted / drafted for depth, (drafted, accepted) in sorted(counts.items()) if drafted}


def acceptance_by_source(measurements: Iterable[Measurement]) -> dict[str, tuple[int, int]]:
    """Drafted and accepted nodes of every source."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for turn in (turn for m in measurements for turn in m.turns):
        for source, (drafted, accepted) in (turn.get("by_source") or {}).items():
            counts[source][0] += drafted
            counts[source][1] += accepted
    return {source: (drafted, accepted) for source, (drafted, accepted) in counts.items()}


def draft_size_over_rounds(measurements: Iterable[Measurement], rounds_a_point: int = 4) -> dict[int, float]:
    """
    Mean number of drafted nodes by round, over the texts that were still being written; `rounds_a_point` rounds are
    taken together, and named after the first of them.
    """
    sizes: dict[int, list[int]] = defaultdict(list)
    for turn in (turn for m in measurements for turn in m.turns):
        for index, size in enumerate(turn.get("draft_sizes") or []):  # without round 0, the prefill
            sizes[index // rounds_a_point * rounds_a_point + 1].append(size)
    return {first: float(np.mean(values)) for first, values in sorted(sizes.items())}
