"""
How the "goodput" schedule's choice depends on load and acceptance, in a world without a clock (`eval.schedule_world`).
Simulated throughout.

    python -m eval.schedule_plot [--out FOLDER]
"""

import argparse
import statistics
import sys
from pathlib import Path

from matplotlib.figure import Figure
from tqdm import tqdm

from eval.cost_models import CostModel, CpuLike, GpuFlat, Steep
from eval.markdown import table
from eval.schedule_world import play
from eval.small_pages import publish

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CHANCES = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
ROUNDS, EARLY = 150, 16


MODELS: tuple[CostModel, ...] = (GpuFlat(), CpuLike(), Steep())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    usual: dict[tuple[str, int, float], tuple[int, int, float]] = {}
    cells = [(model, batch, chance) for model in MODELS for batch in BATCHES for chance in CHANCES]
    for model, batch, chance in tqdm(cells):
        late = play(model, batch, [chance] * ROUNDS, confidence=0.5)[EARLY:]
        reached = sum(r.expected_rate * r.seconds for r in late) / sum(r.seconds for r in late)
        size = round(statistics.median(r.num_nodes for r in late))
        usual[model.name, batch, chance] = (size, late[0].best_nodes, reached / late[0].best_rate)
    write(args.out, usual)
    return 0


def write(out: Path | None, usual: dict[tuple[str, int, float], tuple[int, int, float]]) -> None:
    lines = ["**Simulated.** Usual size of drafts / the best one, and the share of its tokens per second that is"]
    lines += ["reached, exploring included. At first, drafts are believed to be right half of the time."]
    for model in MODELS:
        rows = []
        for chance in CHANCES:
            found = [usual[model.name, batch, chance] for batch in BATCHES]
            rows.append([f"{chance}", *(f"{size} / {best} ({share:.2f})" for size, best, share in found)])
        lines += ["", f"## `{model.name}`", "", *table(["acceptance", *(f"batch {b}" for b in BATCHES)], rows)]
    publish("schedule_plot", [*lines, "", "![Sizes](schedule_plot.png)"], out)
    if out is None:
        return
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    panels = figure.subplots(1, len(MODELS), sharey=True)
    for axes, model in zip(panels, MODELS, strict=True):
        for chance, shade in zip(CHANCES, (0.25, 0.35, 0.45, 0.6, 0.7, 0.85, 1.0), strict=True):
            sizes = [usual[model.name, batch, chance][0] for batch in BATCHES]
            axes.plot(range(len(BATCHES)), sizes, marker="o", color=("#0072B2", shade), label=f"{chance}")
        axes.set_title(f"{model.name} (simulated)", fontsize=10)
        axes.set_xticks(range(len(BATCHES)), BATCHES)
        axes.set_xlabel("batch size")
        axes.grid(color="#EEEEEE")
    panels[0].set_ylabel("drafted tokens a row")
    panels[-1].legend(title="acceptance", fontsize=8)
    figure.savefig(out / "schedule_plot.png", dpi=130)


if __name__ == "__main__":
    sys.exit(main())
