"""Reads the JSON lines that a run wrote."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

BASELINE = "plain"  # the method that every other one is compared with


class Question(NamedTuple):
    """What a pair of measurements must share: a question, or the questions of one batch, joined by `+`."""

    id: str
    batch_size: int


@dataclass
class Measurement:
    """
    One method on one question (or one batch of them), all turns together.

    Args:
        question ([`Question`]), category (`str`), method (`str`), repeat (`int`): What was measured.
        turns (`list[dict]`): As the run wrote them.
        peak_memory_bytes (`int`, *optional*): The highest memory use.
        error (`str`, *optional*): Why there is no result.
    """

    question: Question
    category: str
    method: str
    repeat: int
    turns: list[dict[str, Any]]
    peak_memory_bytes: int | None = None
    error: str | None = None

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> "Measurement":
        return cls(
            Question(str(record["question_id"]), record.get("batch_size") or 1),
            str(record["category"]),
            record["method"],
            record.get("repeat") or 0,
            record.get("turns") or [],
            record.get("peak_memory_bytes"),
            record.get("error"),
        )

    @property
    def new_tokens(self) -> int:
        return sum(turn["new_tokens"] for turn in self.turns)

    def seconds(self, part: str = "total") -> float:
        """Seconds spent in `part`: `"total"`, `"prefill"`, `"draft"`, `"verify"` or `"other"`; 0 if not recorded."""
        return sum(turn["seconds"].get(part) or 0.0 for turn in self.turns)

    @property
    def is_usable(self) -> bool:
        return self.error is None and self.new_tokens > 0 and self.seconds() > 0

    @property
    def tokens_per_second(self) -> float:
        """New tokens a second, the prefill included."""
        return self.new_tokens / self.seconds()

    @property
    def decode_seconds_per_token(self) -> float | None:
        """Seconds a new token took after the prefill, which gave the first one of every turn."""
        tokens = self.new_tokens - len(self.turns)
        return (self.seconds() - self.seconds("prefill")) / tokens if tokens > 0 else None


@dataclass
class CostPoint:
    """`seconds` for one forward of `tokens` tokens in each of `rows` rows, on a cache of `context` tokens."""

    rows: int
    tokens: int
    seconds: float
    context: int | None = None


@dataclass
class RunFile:
    """
    Args:
        path (`Path`): The file.
        headers (`list[dict]`): One for each time that the run was started or resumed.
        measurements (`list[Measurement]`): In the order in which they were made.
        unavailable (`list[tuple[str, str]]`): Methods that could not run, and why.
        cost_curve (`list[CostPoint]`): The machine's.
        rounds (`list[dict]`): Recorded texts with their rounds.
    """

    path: Path
    headers: list[dict[str, Any]] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)
    unavailable: list[tuple[str, str]] = field(default_factory=list)
    cost_curve: list[CostPoint] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def read(cls, path: str | Path) -> "RunFile":
        """
        Raises:
            ValueError: a line that is no record, with its number. A last line that was cut off is passed over.
        """
        run = cls(Path(path))
        lines = run.path.read_text(encoding="utf-8").split("\n")
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                run._add(json.loads(line))
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                if number == len(lines):  # no newline behind it: the run was stopped while it wrote
                    continue
                raise ValueError(f"{run.path}, line {number} is not a run's record: {error!r}.") from error
        return run

    def _add(self, record: dict[str, Any]) -> None:
        kind = record["type"]
        if kind == "header":
            self.headers.append(record)
        elif kind == "measurement":
            self.measurements.append(Measurement.from_record(record))
        elif kind == "unavailable":
            self.unavailable.append((record["method"], record["reason"]))
        elif kind == "cost_curve":
            self.cost_curve.append(
                CostPoint(record["rows"], record["tokens"], record["seconds"], record.get("context"))
            )
        elif kind == "rounds":
            self.rounds.append(record)

    @property
    def methods(self) -> list[str]:
        """Those with measurements, plain decoding first, then in the order of the file."""
        return sorted(unique(m.method for m in self.measurements), key=lambda method: method != BASELINE)

    @property
    def batch_sizes(self) -> list[int]:
        return sorted({m.question.batch_size for m in self.measurements})

    def usable(self, batch_size: int) -> list[Measurement]:
        """The measurements at `batch_size` that gave a result; the questions of one batch are one measurement."""
        found = [m for m in self.measurements if m.question.batch_size == batch_size and m.is_usable]
        return found if batch_size == 1 else _as_batches(found)


def _as_batches(measurements: Iterable[Measurement]) -> list[Measurement]:
    """
    The rows of a batch were written one by one, each with its equal share of the seconds. Taken as independent, they
    would make a mean seem surer than it is.
    """
    batches: dict[tuple, list[Measurement]] = {}
    for m in measurements:
        shares = tuple(tuple(turn["seconds"].items()) for turn in m.turns)
        batches.setdefault((m.category, m.method, m.repeat, shares), []).append(m)
    return [
        replace(
            rows[0],
            question=Question("+".join(m.question.id for m in rows), rows[0].question.batch_size),
            turns=[turn for m in rows for turn in m.turns],
        )
        for rows in batches.values()
    ]


def unique(values: Iterable[str]) -> list[str]:
    """The values without repetition, in order."""
    return list(dict.fromkeys(values))
