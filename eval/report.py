"""
Turns runs into Markdown tables and pictures.

    python -m eval.report RUN.jsonl... [--out FOLDER]

writes `report.md` and PNG files into FOLDER (by default one beside the first run, named after it). Every run gets a
section of its own, and methods are compared within one run only. The exit status is 1 if a text differed from plain
decoding by more than a near tie, or a method failed that is not a peer's.
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from .markdown import MISSING, or_missing, table
from .pictures import draft_pictures, machine_pictures, speed_pictures
from .plots import kind_of
from .run_files import BASELINE, Measurement, RunFile
from .statistics import (
    CONFIDENCE,
    MIN_QUESTIONS,
    geometric_mean,
    noise,
    paired_speedups,
    speedups_by_category,
    tokens_per_forward,
    tokens_per_second,
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN.jsonl")
    parser.add_argument("--out", type=Path, help="folder of the report")
    options = parser.parse_args(arguments)
    if len({path.stem for path in options.runs}) < len(options.runs):
        parser.error("the runs need different file names, as pictures are named after them")
    runs = [RunFile.read(path) for path in options.runs]
    folder = options.out or options.runs[0].with_name(f"{options.runs[0].stem}-report")
    print(write_report(runs, folder))
    return 1 if any(faults(run) or own_failures(run) for run in runs) else 0


def write_report(runs: Sequence[RunFile], folder: Path) -> Path:
    """Writes the report of `runs` into `folder`; returns the path of its page."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["# Speculative decoding, measured", ""]
    for run in runs:
        lines += [f"- **{run.path.name}**: {warning}" for warning in warnings(run)]
    for run in runs:
        lines += ["", f"## {run.path.name}", "", *section(run, folder)]
    page = folder / "report.md"
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines))
    page.write_text(text.rstrip() + "\n", encoding="utf-8")
    return page


def section(run: RunFile, folder: Path) -> list[str]:
    """Everything about one run."""
    lines = origin(run)
    for batch_size in run.batch_sizes:
        title = f"### Batch size {batch_size}"
        measured = run.usable(batch_size)
        lines += ["", title, "", *overview(run.methods, measured), "", *speedup_table(run, measured)]
        lines += ["", *speed_pictures(run, batch_size, measured, folder)]
        lines += ["", *draft_pictures(run, batch_size, measured, folder)]
    lines += ["", *machine_pictures(run, folder)]
    lines += ["", "### Equality with plain decoding", "", *equality_table(run)]
    if run.unavailable:
        reasons = [[f"`{method}`", reason] for method, reason in run.unavailable]
        lines += ["", "### Methods that could not run", "", *table(["method", "reason"], reasons)]
    return lines


# ---------------------------------------------------------------------- what must be said first


def warnings(run: RunFile) -> list[str]:
    """What a reader must know before any number."""
    said = []
    if found := faults(run):
        said.append(f"**{len(found)} text(s) differ from plain decoding by more than rounding.**")
    if failed := failures(run):
        said.append(f"**{len(failed)} measurement(s) failed: {', '.join(sorted({m.method for m in failed}))}.**")
    if not run.batch_sizes:
        said.append("**Nothing has been measured yet.**")
    for batch_size in run.batch_sizes:
        seen = noise(run.usable(batch_size))
        where = f" at batch size {batch_size}" if len(run.batch_sizes) > 1 else ""
        if seen.is_noisy:
            said.append(
                f"**Noisy machine{where}**: plain decoding itself varied by {seen}. "
                "Differences of that size mean nothing here."
            )
        elif not seen.is_known:
            said.append(f"How steady the machine was{where} is not known: {seen}.")
        else:
            said.append(f"The machine was steady{where}, as far as plain decoding shows: {seen}.")
    return said


def faults(run: RunFile) -> list[str]:
    """The differences from plain decoding that rounding does not explain."""
    return [
        f"{m.method}, question {m.question.id}, turn {number}: {turn.get('difference') or 'no details'}"
        for m in run.measurements
        for number, turn in enumerate(m.turns, start=1)
        if turn.get("equality") == "fault"
    ]


def failures(run: RunFile) -> list[Measurement]:
    return [m for m in run.measurements if m.error is not None]


def own_failures(run: RunFile) -> list[Measurement]:
    """Those of methods that are not somebody else's."""
    return [m for m in failures(run) if kind_of(m.method) != "peer"]


def origin(run: RunFile) -> list[str]:
    """The command and the environment, once for every time that the run was started."""
    lines = []
    for header in run.headers:
        command = header.get("command", "")
        text = command if isinstance(command, str) else " ".join(map(str, command))
        lines += ["```", text, "```", ""]
    header = run.headers[-1] if run.headers else {}
    for title in ("environment", "config"):
        values = [
            f"{name} {_plainly(value)}" for name, value in (header.get(title) or {}).items() if value not in (None, [])
        ]
        if values:
            lines += [f"{title.capitalize()}: " + " · ".join(values) + ".", ""]
    return lines


def _plainly(value) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# ---------------------------------------------------------------------- tables


def overview(methods: Sequence[str], measured: Sequence[Measurement]) -> list[str]:
    """One line for each method: tokens per forward beside tokens per second, and where the time went."""
    counted = "questions" if all(m.question.batch_size == 1 for m in measured) else "batches"
    head = ["method", counted, "speed-up", "tokens per forward", "tokens/s"]
    head += ["prefill", "draft", "verify", "other", "peak memory"]
    rows = []
    for method in methods:
        own = [m for m in measured if m.method == method]
        if not own:
            continue
        estimate = "1" if method == BASELINE else geometric_mean(paired_speedups(measured, method).values())
        total = sum(m.seconds() for m in own)
        parts = [sum(m.seconds(part) for m in own) / total for part in ("prefill", "draft", "verify", "other")]
        memory = max((m.peak_memory_bytes or 0 for m in own), default=0)
        rows.append([
            f"`{method}`", str(len({m.question for m in own})), or_missing(estimate),
            or_missing(tokens_per_forward(own), ".2f"), or_missing(tokens_per_second(own), ".1f"),
            *[f"{part:.0%}" if any(parts) else MISSING for part in parts],
            f"{memory / 2**20:,.0f} MiB" if memory else MISSING,
        ])  # fmt: skip
    return table(head, rows)


def speedup_table(run: RunFile, measured: Sequence[Measurement]) -> list[str]:
    """Speed-up over plain decoding by method and category."""
    by_category = speedups_by_category(measured)
    rows = [
        [f"`{method}`", *[or_missing(by_method.get(method)) for by_method in by_category.values()]]
        for method in run.methods
        if any(method in by_method for by_method in by_category.values())
    ]
    note = (
        "Speed-up over plain decoding: tokens a second, prefill included, as the geometric mean of the questions' "
        f"paired ratios, with its {CONFIDENCE:.0%} bootstrap interval over questions (of at least {MIN_QUESTIONS}). "
        "Rows that were generated as one batch count as one question."
    )
    return [note, "", *table(["method", *by_category], rows)]


def equality_table(run: RunFile) -> list[str]:
    """How many texts were equal, and every difference in words."""
    kinds = ["equal", "near_tie", "fault", "reference", None]
    rows = []
    for method in run.methods:
        own = [m for m in run.measurements if m.method == method]
        counts = Counter(turn.get("equality") for m in own for turn in m.turns)
        failed = [m for m in own if m.error is not None]
        rows.append([f"`{method}`", *[str(counts[kind]) for kind in kinds], str(len(failed))])
    lines = table(["method", "equal", "near tie", "fault", "reference", "not compared", "failed"], rows)
    said = [f"- fault: {fault}" for fault in faults(run)]
    said += [f"- near tie: {text}" for text in near_ties(run)]
    said += [f"- failed: {m.method}, question {m.question.id}: {m.error}" for m in failures(run)]
    return lines + ([""] + said if said else [])


def near_ties(run: RunFile) -> list[str]:
    """The differences that rounding explains, each once, with the number of texts that showed it."""
    found = Counter(
        f"{m.method}, question {m.question.id}, turn {number}: {turn.get('difference') or 'no details'}"
        for m in run.measurements
        for number, turn in enumerate(m.turns, start=1)
        if turn.get("equality") == "near_tie"
    )
    return [text if count == 1 else f"{text} ({count} times)" for text, count in found.items()]


if __name__ == "__main__":
    sys.exit(main())
