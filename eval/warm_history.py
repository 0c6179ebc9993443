"""
What a `DraftHistory` adds over similar questions: tokens per forward of the default drafters on the embedded model,
question by question within each category, with a history that starts empty and is kept, and without one. The texts are
the same.

    python -m eval.warm_history [--data FILE.jsonl] [--per-category 8] [--new-tokens 128] [--nodes 15] [--out FOLDER]

Tokens per forward do not depend on what else the machine does.
"""

import argparse
import sys
from collections import defaultdict
from pathlib import Path

import torch
from matplotlib.figure import Figure
from tqdm import tqdm

import hf_specstate
from eval.data import load_questions
from eval.embedded_model import load_embedded_model
from eval.markdown import table
from eval.prompts import encode
from eval.small_pages import publish
from hf_specstate import DraftHistory

FRESH, WARM = "nothing kept", "history kept"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="sample")
    parser.add_argument("--per-category", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--nodes", type=int, default=15)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model, tokenizer = load_embedded_model()
    hf_specstate.enable(model)
    options = {"max_new_tokens": args.new_tokens, "do_sample": False, "return_spec_states": True}
    options["spec_config"] = {"schedule": "constant", "max_nodes": args.nodes, "strict": True}
    histories: dict[str, DraftHistory] = defaultdict(DraftHistory)
    places: dict[str, int] = defaultdict(int)
    rates: dict[str, dict[int, list[float]]] = {FRESH: defaultdict(list), WARM: defaultdict(list)}
    by_category: dict[str, dict[str, list[float]]] = defaultdict(lambda: {FRESH: [], WARM: []})
    for question in tqdm(load_questions(args.data, args.per_category)):
        places[question.category] += 1
        inputs = torch.tensor([encode(tokenizer, [{"role": "user", "content": question.turns[0]}])])
        mask = torch.ones_like(inputs)
        fresh = model.generate(inputs, attention_mask=mask, **options)
        warm = model.generate(inputs, attention_mask=mask, draft_history=histories[question.category], **options)
        if not torch.equal(fresh.sequences, warm.sequences):
            print(f"FAULT question {question.question_id}: the texts differ", file=sys.stderr)
            return 1
        for name, out in ((FRESH, fresh), (WARM, warm)):
            rate = out.spec_states[0].mean_tokens_per_forward
            if rate == rate:  # an answer of one token has no rounds
                rates[name][places[question.category]].append(rate)
                by_category[question.category][name].append(rate)
    write(args.out, rates, by_category)
    return 0


def write(out: Path | None, rates: dict, by_category: dict) -> None:
    def mean(values: list[float]) -> str:
        return f"{sum(values) / len(values):.2f}" if values else "–"

    head = ["question of its category", FRESH, WARM]
    lines = table(head, [[str(n), mean(rates[FRESH][n]), mean(rates[WARM][n])] for n in sorted(rates[FRESH])])
    lines += [
        "",
        *table(["category", FRESH, WARM], [[c, mean(r[FRESH]), mean(r[WARM])] for c, r in by_category.items()]),
    ]
    publish("warm_history", lines, out, note=": mean tokens per forward")
    if out is None:
        return
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    for name, by_place in rates.items():
        places = sorted(by_place)
        axes.plot(places, [sum(by_place[n]) / len(by_place[n]) for n in places], marker="o", label=name)
    axes.set(xlabel="question within its category", ylabel="tokens per forward", ylim=(1, None))
    axes.legend()
    figure.savefig(out / "warm_history.png", dpi=150)


if __name__ == "__main__":
    sys.exit(main())
