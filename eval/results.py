"""The file of a run: one JSON line for everything that was measured."""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_specstate import SpecSequence
from hf_specstate.token_tree import names_of

from .config import FIXED
from .conversation import Turn
from .data import Question
from .plan import BASELINE
from .reference import FAULT, Text, Verdict

Key = tuple[str, str, int, int]  # question, method, repeat, batch size


@dataclass
class ResultFile:
    """
    Lines are only ever added, and each is written at once, so that nothing is lost when a run is stopped.

    Args:
        path (`Path`): Where the lines are; a file that exists is continued.
        header (`dict`, *optional*): The last header of an existing file.
        done (`set`): What the file has already.
        plain (`dict`): By question and batch size, the texts of plain decoding.
        cost_curve (`set[tuple[int, int]]`): Rows and tokens of the forwards that were timed.
    """

    path: Path
    header: dict[str, Any] | None = None
    done: set[Key] = field(default_factory=set)
    plain: dict[tuple[str, int], list[Text]] = field(default_factory=dict)
    cost_curve: set[tuple[int, int]] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)
    errors: list[tuple[str, str]] = field(default_factory=list)
    _unavailable: set[tuple[str, str]] = field(default_factory=set)

    @classmethod
    def open(cls, path: Path) -> "ResultFile":
        """Reads what an earlier run left. A line that it was stopped in the middle of is dropped."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        results = cls(path)
        text = path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            path.write_text(whole, encoding="utf-8")
        for line in whole.splitlines():
            results._take_note(json.loads(line))
        return results

    def start(self, header: dict[str, Any]) -> None:
        """
        Raises:
            ValueError: the file holds a run with other settings, which would not be comparable.
        """
        if self.header is not None:
            old, new = (
                known["config"] | {"threads": known["environment"]["threads"]} for known in (self.header, header)
            )
            for name in (*FIXED, "data_sha256", "threads"):  # as they are, also if nobody named a number
                if old.get(name) != new.get(name):
                    raise ValueError(
                        f"{self.path} was measured with {name} {old.get(name)!r}, not {new.get(name)!r}: choose "
                        "another --output, or repeat the settings to continue it."
                    )
        if self.header is None or any(self.header[name] != header[name] for name in ("config", "environment")):
            self.add(header)

    def add(self, *records: dict[str, Any]) -> None:
        """Writes lines that belong together in one piece."""
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(lines)
        for record in records:
            self._take_note(record)

    def add_unavailable(self, method: str, reason: str) -> None:
        if (method, reason) not in self._unavailable:
            self.add({"type": "unavailable", "method": method, "reason": reason})

    def _take_note(self, record: dict[str, Any]) -> None:
        kind = record["type"]
        if kind == "header":
            self.header = record
        elif kind == "measurement":
            key = (record["question_id"], record["method"], record["repeat"], record["batch_size"])
            self.done.add(key)
            where = "{1}, question {0}, repeat {2}, batch size {3}".format(*key)
            if record["error"] is not None:
                self.errors.append((record["method"], f"{where}: {record['error']}"))
            self.faults += [f"{where}: {turn['difference']}" for turn in record["turns"] if turn["equality"] == FAULT]
        elif kind == "rounds" and record["method"] == BASELINE:
            texts = self.plain.setdefault((record["question_id"], record["batch_size"]), [])
            if record["turn"] == len(texts):
                texts.append(Text(record["prompt_ids"], record["output_ids"]))
        elif kind == "cost_curve":
            self.cost_curve.add((record["rows"], record["tokens"]))
        elif kind == "unavailable":
            self._unavailable.add((record["method"], record["reason"]))


def measurement_line(
    question: Question,
    method: str,
    repeat: int,
    position: int,
    batch_size: int,
    turns: Sequence[Turn],
    verdicts: Sequence[Verdict],
    error: str | None = None,
) -> dict[str, Any]:
    """One question, one method, one repeat. In a batch, `seconds` is the question's share: the batch's by its rows."""
    return {
        "type": "measurement",
        "question_id": question.question_id,
        "category": question.category,
        "method": method,
        "repeat": repeat,
        "position_in_order": position,
        "batch_size": batch_size,
        "turns": [_turn(turn, verdict) for turn, verdict in zip(turns, verdicts, strict=True)],
        "peak_memory_bytes": max((turn.cost.peak_memory_bytes for turn in turns), default=None),
        "error": error,
    }


def rounds_lines(question: Question, method: str, batch_size: int, turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """The texts with their rounds, for replaying them. Plain decoding has none; its texts are the reference."""
    return [
        {
            "type": "rounds",
            "question_id": question.question_id,
            "category": question.category,
            "method": method,
            "batch_size": batch_size,
            "turn": place,
            "prompt_ids": turn.prompt_ids,
            "output_ids": turn.output_ids,
            "rounds": [
                {
                    "index": spec_round.index,
                    "start": spec_round.start,
                    "token_ids": spec_round.token_ids,
                    "parents": spec_round.parents,
                    "sources": spec_round.sources,
                    "accepted": spec_round.accepted,
                    "added_token_id": spec_round.added_token_id,
                }
                for spec_round in turn.rounds or ()
            ],
        }
        for place, turn in enumerate(turns)
    ]


def _turn(turn: Turn, verdict: Verdict) -> dict[str, Any]:
    cost, new = turn.cost, len(turn.output_ids)
    return {
        "prompt_tokens": len(turn.prompt_ids),
        "new_tokens": new,
        "text_sha256": hashlib.sha256(turn.text.encode()).hexdigest(),
        "seconds": {part: round(seconds / turn.rows, 6) for part, seconds in cost.seconds.items()},
        "target_forwards": cost.target_forwards,
        "assistant_forwards": cost.assistant_forwards,
        "verified_nodes": cost.verified_nodes,
        "tokens_per_forward": cost.tokens_per_forward(new),
        "equality": verdict.equality,
        "difference": verdict.difference,
        **_acceptance(turn.rounds),
    }


def _acceptance(rounds: SpecSequence | None) -> dict[str, Any]:
    """What became of the drafts, by depth and by source; the prefill drafts nothing."""
    if rounds is None:
        return {"accepted_by_depth": None, "by_source": None, "draft_sizes": None}
    drafted: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    by_source: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for spec_round in rounds:
        for node, (depth, source) in enumerate(zip(spec_round.depths, spec_round.sources, strict=True)):
            drafted[depth] += 1
            accepted[depth] += node in spec_round.accepted
            for name in names_of(source):
                by_source[name][0] += 1
                by_source[name][1] += node in spec_round.accepted
    return {
        "accepted_by_depth": [[depth, drafted[depth], accepted[depth]] for depth in sorted(drafted)],
        "by_source": dict(by_source),
        "draft_sizes": [len(spec_round.token_ids) for spec_round in rounds if spec_round.index > 0],
    }
