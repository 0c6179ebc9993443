"""
Simulates drafters on machines that we do not have: recorded texts are replayed (exactly), and every forward is charged
by a cost curve (an assumption).

    python -m eval.simulate RUN.jsonl... --curve measured|gpu-flat|steep --batch 1,4,16,64
        --drafters prompt_lookup --nodes 0,1,2,4,8,15 --width 1,2 [--out FOLDER]

The texts are the `rounds` lines of the runs, and `measured` takes the cost curve of the last run that has one (its
seconds then include the drafting, as fast as it is on this machine; other curves count drafting as free).
`--drafters a,b+c` simulates `a` alone, then `b` and `c` merged. A batch is filled with texts of one category and ends
with its longest, as in `generate()`; prefills are left out. With `--out`, tables and a picture go into FOLDER too.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from . import plots
from .cost_models import COST_MODELS, CostModel, Measured
from .markdown import table
from .replay import RecordedText, Replay, Setting, replay, tokens_per_forward
from .run_files import RunFile, unique
from .statistics import ALL


@dataclass
class Simulated:
    """
    Args:
        setting ([`Setting`]): How was drafted.
        tokens_per_forward (`float`): Over all texts.
        drafting_ms (`float`): Drafting time a row and round, in milliseconds, on this machine.
        speedups (`dict[int, dict[str, float]]`): By batch size and category.
    """

    setting: Setting
    tokens_per_forward: float
    drafting_ms: float
    speedups: dict[int, dict[str, float]]


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    runs = [RunFile.read(path) for path in options.runs]
    texts = recorded_texts(runs)
    if not texts:
        raise SystemExit("No run holds `rounds` lines to replay: measure a method that records its rounds.")
    try:
        model = make_model(options.curve, runs)
        settings = make_settings(options.drafters, options.nodes, options.width)
        results = [simulate(each, texts, model, options.batch) for each in tqdm(settings, "simulating", leave=False)]
    except ValueError as error:  # an unknown drafter, one that needs a model, no cost curve
        raise SystemExit(str(error)) from None
    lines = page(results, texts, model, options.batch)
    print("\n".join(lines))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        picture = f"simulated-{model.name}.png"
        draw(options.out / picture, results, model, options.batch)
        lines += ["", f"![Simulated speed-up]({picture})"]
        (options.out / f"simulated-{model.name}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def simulate(
    setting: Setting, texts: Sequence[RecordedText], model: CostModel, batch_sizes: Sequence[int]
) -> Simulated:
    """Replays every text once, and prices the rounds at each batch size."""
    config = setting.config()
    replay(texts[0], config)  # nobody is charged for what happens once
    replays = [replay(text, config) for text in texts]
    groups = {
        category: [r for r in replays if r.category == category] for category in unique(r.category for r in replays)
    }
    groups[ALL] = replays
    rounds = sum(len(played.widths) for played in replays)
    return Simulated(
        setting,
        tokens_per_forward(replays),
        1e3 * sum(played.drafting_seconds for played in replays) / max(rounds, 1),
        {
            batch_size: {category: speedup(played, model, batch_size) for category, played in groups.items()}
            for batch_size in batch_sizes
        },
    )


def speedup(replays: Sequence[Replay], model: CostModel, batch_size: int) -> float:
    """The cost of plain decoding over that of speculation, for the texts in batches of `batch_size`."""
    plain = speculative = 0.0
    for batch in in_batches(replays, batch_size):
        longest = max(played.num_tokens for played in batch)
        plain += longest * model.cost(batch_size, 1)
        for number in range(max(len(played.widths) for played in batch)):
            width = max(played.widths[number] for played in batch if number < len(played.widths))
            speculative += model.cost(batch_size, width)
        if model.has_seconds:
            speculative += sum(played.drafting_seconds for played in batch)
    return plain / speculative if speculative else math.nan


def in_batches(replays: Sequence[Replay], batch_size: int) -> list[list[Replay]]:
    """All texts, in order; the last batch is filled up from the first texts."""
    count = math.ceil(len(replays) / batch_size)
    return [[replays[(first * batch_size + row) % len(replays)] for row in range(batch_size)] for first in range(count)]


# ---------------------------------------------------------------------- input


def recorded_texts(runs: Sequence[RunFile]) -> list[RecordedText]:
    """Every text that the runs recorded, once, whichever method wrote it."""
    texts: dict[tuple, RecordedText] = {}
    for run in runs:
        config = run.headers[-1].get("config") or {} if run.headers else {}
        for record in run.rounds:
            key = (str(run.path), str(record["question_id"]), record.get("turn"))
            if key not in texts and record["output_ids"]:
                texts[key] = RecordedText(
                    str(record["category"]), record["prompt_ids"], record["output_ids"], config.get("new_tokens")
                )
    return list(texts.values())


def make_model(name: str, runs: Sequence[RunFile]) -> CostModel:
    """
    Raises:
        ValueError: `measured` without a measured curve.
    """
    if name == "measured":
        curve, origin = next(((r.cost_curve, r.path.name) for r in reversed(runs) if r.cost_curve), ([], ""))
        return Measured(curve, origin)
    return COST_MODELS[name]()


def make_settings(drafters: Sequence[str], nodes: Sequence[int], widths: Sequence[int]) -> list[Setting]:
    """All combinations that differ: one node leaves no alternatives, none leaves nothing."""
    return [
        Setting(names, max_nodes, width)
        for names in drafters
        for width in widths
        for max_nodes in nodes
        if width <= max(max_nodes, 1) or width == min(widths)
    ]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN.jsonl")
    parser.add_argument("--curve", choices=["measured", *COST_MODELS], default="measured")
    parser.add_argument("--batch", type=_numbers, default=[1], metavar="B,B")
    parser.add_argument("--drafters", type=lambda text: text.split(","), default=["prompt_lookup"], metavar="NAME,A+B")
    parser.add_argument("--nodes", type=_numbers, default=[0, 1, 2, 4, 8, 15], metavar="N,N")
    parser.add_argument("--width", type=_numbers, default=[1], metavar="W,W")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(arguments)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


# ---------------------------------------------------------------------- output


def page(
    results: Sequence[Simulated], texts: Sequence[RecordedText], model: CostModel, batch_sizes: Sequence[int]
) -> list[str]:
    """Tables, one for each batch size, with the best setting of every category in bold."""
    lines = [f"# Simulated on the `{model.name}` cost curve", ""]
    lines += [
        f"{len(texts)} recorded texts. Accepted tokens are exact; times are what the curve says.",
        *_caveats(results),
    ]
    if isinstance(model, Measured):
        lines.append(f"The curve is that of {model.origin}, measured up to {model.most_rows} row(s).")
        if max(batch_sizes) > model.most_rows:
            lines.append("Larger batches are extrapolated.")
    for batch_size in batch_sizes:
        categories = list(results[0].speedups[batch_size])
        best = {category: max(r.speedups[batch_size][category] for r in results) for category in categories}
        head = ["drafters", "nodes", "width", "tokens per forward", "drafting, ms", *categories]
        rows = [
            [
                f"`{result.setting.drafters}`",
                str(result.setting.max_nodes),
                str(result.setting.tree_width),
                f"{result.tokens_per_forward:.2f}",
                f"{result.drafting_ms:.2f}",
                *[_bold(value, value == best[name]) for name, value in result.speedups[batch_size].items()],
            ]
            for result in results
        ]
        lines += ["", f"## Simulated speed-up over plain decoding, batch size {batch_size}", "", *table(head, rows)]
    return lines


def draw(path: Path, results: Sequence[Simulated], model: CostModel, batch_sizes: Sequence[int]) -> None:
    """Simulated speed-up against the size of drafts, over all texts, a panel for each batch size."""
    panels: dict[str, dict[str, dict[int, float]]] = {f"batch size {size}": {} for size in batch_sizes}
    for result in results:
        name = f"{result.setting.drafters}, width {result.setting.tree_width}"
        for size in batch_sizes:
            line = panels[f"batch size {size}"].setdefault(name, {})
            line[result.setting.max_nodes] = result.speedups[size][ALL]
    title = f"Simulated on the {model.name} cost curve"
    plots.lines_by_setting(path, title, "drafted tokens, at most", "simulated speed-up", panels)


def _bold(value: float, is_best: bool) -> str:
    return f"**{value:.2f}**" if is_best else f"{value:.2f}"


def _caveats(results: Sequence[Simulated]) -> list[str]:
    drafters = [drafter for result in results for drafter in result.setting.config().drafters or []]
    names = unique(drafter.name for drafter in drafters if drafter.wants_answers)
    if not names:
        return []
    return [f"{', '.join(names)} learned from accepted tokens only: the answers to rejected ones are not in a text."]


if __name__ == "__main__":
    main()
