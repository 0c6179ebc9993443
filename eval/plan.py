"""What is measured when: which questions go together, which methods take part, and in which order."""

import fnmatch
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .data import Question

BASELINE = "plain"


@dataclass
class MethodPlan:
    """
    Args:
        name (`str`): Of the method.
        repeats (`int`): How often each of its questions is measured.
        per_category (`int`, *optional*): How many questions of each category; all if absent.
    """

    name: str
    repeats: int = 1
    per_category: int | None = None


@dataclass
class Batch:
    """
    Questions that are generated together.

    Args:
        index (`int`): Its number among the batches of this size.
        batch_size (`int`): Rows it should have; the last one of a category may have fewer.
        questions (`list[Question]`): All of one category and with the same number of turns.
        place (`int`): Place of its first question in its category.
    """

    index: int
    batch_size: int
    questions: list[Question]
    place: int


def plan_methods(entries: Sequence[str], known: Mapping[str, Any]) -> list[MethodPlan]:
    """
    Args:
        entries (`list[str]`):
            `NAME[:REPEATS][@QUESTIONS]`, with patterns as names; a later entry goes before earlier ones.
        known (`Mapping`): The registry.

    Returns:
        `list[MethodPlan]`: In the order of the registry. Plain decoding is there in any case, for every question and at
        least as often as any other method.

    Raises:
        ValueError: an entry that names no method, or numbers that are none.
    """
    plans: dict[str, MethodPlan] = {}
    for entry in entries:
        rest, _, per_category = entry.partition("@")
        pattern, _, repeats = rest.partition(":")
        names = fnmatch.filter(known, pattern)
        if not names:
            raise ValueError(f"There is no method {pattern!r}; there are {', '.join(known)}.")
        if any(part and not (part.isdigit() and int(part)) for part in (repeats, per_category)):
            raise ValueError(f"{entry!r} must be NAME, NAME:REPEATS, NAME@QUESTIONS or NAME:REPEATS@QUESTIONS.")
        for name in names:
            plans[name] = MethodPlan(name, int(repeats or 1), int(per_category) if per_category else None)
    most = max(plan.repeats for plan in plans.values())
    plans[BASELINE] = MethodPlan(BASELINE, most)
    return [plans[name] for name in known if name in plans]


def batches(questions: Sequence[Question], batch_size: int) -> list[Batch]:
    """The questions in batches; a batch holds one category and one number of turns."""
    groups: dict[tuple[str, int], list[Question]] = {}
    for question in questions:
        groups.setdefault((question.category, len(question.turns)), []).append(question)
    made: list[Batch] = []
    places: Counter[str] = Counter()
    for group in groups.values():
        for start in range(0, len(group), batch_size):
            rows = group[start : start + batch_size]
            made.append(Batch(len(made), batch_size, rows, places[rows[0].category]))
            places[rows[0].category] += len(rows)
    return made


def order(plans: Sequence[MethodPlan], batch: Batch, repeat: int) -> list[MethodPlan]:
    """
    The methods that measure this batch in this repeat. The order is rotated from batch to batch and from repeat to
    repeat: over a run every method has every place equally often, so that a machine that slows down slows them all.
    """
    taking_part = [
        plan
        for plan in plans
        if repeat < plan.repeats and (plan.per_category is None or batch.place < plan.per_category)
    ]
    first = (batch.index + repeat) % len(taking_part) if taking_part else 0
    return taking_part[first:] + taking_part[:first]
