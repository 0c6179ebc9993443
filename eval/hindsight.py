"""
How near the "goodput" schedule comes to the setting that would have been best, category by category: every question is
answered with each fixed setting (source set x size) and with the schedule, one after the other, on the embedded model.

    python -m eval.hindsight [--data FILE.jsonl] [--per-category 2] [--new-tokens 128] [--out FOLDER]

Two rates are given: *measured*, by the clock, and *priced*, in which every forward takes what the machine's cost curve
says and the rest of a round what it took on average, so that a slow moment of the machine falls on nobody. The curve is
that of forwards as this package makes them. Alone on the machine.
"""

import argparse
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import hf_specstate
from eval.cost_curve import cost_curve
from eval.data import load_questions
from eval.embedded_model import load_embedded_model
from eval.markdown import table
from eval.prompts import encode
from eval.small_pages import publish
from eval.statistics import ALL
from hf_specstate.few_rows import few_rows_view
from hf_specstate.states import SpecRound

SCHEDULE = "goodput"
MIXTURE = ["history", "previous_drafts", "recycling"]
# name -> spec_config
SETTINGS: dict[str, dict[str, Any]] = {
    SCHEDULE: {},
    "nothing drafted": {"schedule": "constant", "max_nodes": 0},
    **{f"all sources, {size}": {"schedule": "constant", "max_nodes": size} for size in (1, 3, 7, 11, 15)},
    **{
        f"{source}, {size}": {"schedule": "constant", "max_nodes": size, "drafters": [source]}
        for source in ("history", "recycling")
        for size in (3, 15)
    },
    "history + recycling, 15": {"schedule": "constant", "max_nodes": 15, "drafters": ["history", "recycling"]},
}


@dataclass
class Rounds:
    """What a setting did in a category, without the prefills."""

    tokens: int = 0
    seconds: float = 0.0
    widths: list[int] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)  # seconds of each round that were no forward

    def add(self, rounds: list[SpecRound]) -> None:
        for played in rounds[1:]:
            self.tokens += len(played.committed_token_ids)
            self.seconds += played.seconds
            self.widths.append(played.width)
            self.beside.append(played.draft_seconds + played.other_seconds)

    def measured(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    def priced(self, curve: dict[int, float]) -> float:
        """Tokens a second, if forwards cost what the curve says."""
        forwards = sum(curve[width] for width in self.widths)
        return self.tokens / (forwards + sum(self.beside))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="sample")
    parser.add_argument("--per-category", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model, tokenizer = load_embedded_model()
    records = cost_curve(model, set(), tokens=range(1, 17), all_rows=(1,), call=few_rows_view(model))
    curve = {record["tokens"]: record["seconds"] for record in records}
    hf_specstate.enable(model)
    played: dict[str, dict[str, Rounds]] = defaultdict(lambda: defaultdict(Rounds))
    questions = load_questions(args.data, args.per_category)
    for number, question in enumerate(tqdm([questions[0], *questions])):  # the first one warms up
        ids = torch.tensor([encode(tokenizer, [{"role": "user", "content": question.turns[0]}])])
        expected = None
        turn = number % len(SETTINGS)
        for name, config in [*SETTINGS.items()][turn:] + [*SETTINGS.items()][:turn]:
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=args.new_tokens, do_sample=False,
                spec_config=config | {"strict": True}, return_spec_states=True,
            )  # fmt: skip
            expected = out.sequences if expected is None else expected
            if not torch.equal(out.sequences, expected):
                print(f"FAULT question {question.question_id}: {name} gives another text", file=sys.stderr)
                return 1
            if number and len(out.spec_states[0]) > 1:
                for category in (question.category, ALL):
                    played[category][name].add(out.spec_states[0].rounds)
    write(args.out, played, curve)
    return 0


def against_the_best(rates: dict[str, float]) -> list[str]:
    """Cells: the fixed setting with the best rate, that rate, the schedule's, and their ratio."""
    fixed = {name: rate for name, rate in rates.items() if name != SCHEDULE}
    best = max(fixed, key=lambda name: fixed[name])
    return [best, f"{fixed[best]:.1f}", f"{rates[SCHEDULE]:.1f}", f"{rates[SCHEDULE] / fixed[best]:.2f}"]


def write(out: Path | None, played: dict[str, dict[str, Rounds]], curve: dict[int, float]) -> None:
    rows = []
    for category, by_setting in played.items():
        priced = {name: rounds.priced(curve) for name, rounds in by_setting.items()}
        measured = {name: rounds.measured() for name, rounds in by_setting.items()}
        rows.append([category, *against_the_best(priced), *against_the_best(measured)])
    head = ["category"]
    for kind in ("priced", "measured"):
        head += [f"best fixed setting, {kind}", "its tokens/s", "goodput", "ratio"]
    everything = played[ALL]
    settings = [
        [name, f"{r.tokens / len(r.widths):.2f}", f"{statistics.fmean(r.widths) - 1:.1f}",
         f"{1e3 * statistics.fmean(r.beside):.1f}", f"{r.priced(curve):.1f}", f"{r.measured():.1f}"]
        for name, r in everything.items()
    ]  # fmt: skip
    lines = [*table(head, rows), "", "Over all questions:", ""]
    lines += table(
        ["setting", "tokens a forward", "nodes", "beside the forward, ms", "priced tokens/s", "measured tokens/s"],
        settings,
    )
    lines += ["", "Cost of a forward by its width, ms: " + ", ".join(f"{w}: {1e3 * s:.0f}" for w, s in curve.items())]
    publish("hindsight", lines, out)


if __name__ == "__main__":
    sys.exit(main())
