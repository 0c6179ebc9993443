"""
How soon the "goodput" schedule notices that a text changes: prose, then a copied list, then prose. A logits processor
makes the embedded model write exactly this text (its answer to a question, passages of its prompt, its answer to
another), so all settings write the same.

    python -m eval.reaction [--data FILE.jsonl] [--stretch 300] [--out FOLDER]

For every stretch, from where the schedule is after its first 16 rounds in it: its tokens a second as a multiple of what
the best fixed size reaches on the same tokens. As in `eval.hindsight`, *priced* rates take forwards at the machine's
cost curve. Alone on the machine.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from tqdm import tqdm
from transformers import LogitsProcessor, LogitsProcessorList

import hf_specstate
from eval.cost_curve import cost_curve
from eval.data import Question, load_questions
from eval.embedded_model import load_embedded_model
from eval.hindsight import SCHEDULE, Rounds, against_the_best
from eval.markdown import table
from eval.prompts import encode
from eval.small_pages import publish
from hf_specstate.few_rows import few_rows_view
from hf_specstate.states import SpecRound

SIZES = (0, 3, 7, 15)
LATE = 16  # rounds
STRETCHES = ("prose", "copied list", "prose again")


class Dictation(LogitsProcessor):
    """Lets the model write nothing but `token_ids`, after a prompt of `start` tokens."""

    def __init__(self, token_ids: list[int], start: int):
        self._token_ids, self._start = token_ids, start

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        token = self._token_ids[input_ids.shape[1] - self._start]
        only = torch.full_like(scores, -torch.inf)
        only[:, token] = 0
        return only


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="sample")
    parser.add_argument("--stretch", type=int, default=300, help="tokens")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model, tokenizer = load_embedded_model()
    prompt, text = dictated(model, tokenizer, load_questions(args.data, 4), args.stretch)
    records = cost_curve(model, set(), tokens=range(1, 17), all_rows=(1,), call=few_rows_view(model))
    curve = {record["tokens"]: record["seconds"] for record in records}
    hf_specstate.enable(model)
    settings: dict[str, dict[str, Any]] = {SCHEDULE: {}} | {
        str(size): {"schedule": "constant", "max_nodes": size} for size in SIZES
    }
    played: dict[str, list[list[SpecRound]]] = {name: [] for name in settings}
    for repeat in tqdm(range(-1, args.repeats), desc="repeats; the first one warms up"):
        for name, config in settings.items():
            out = model.generate(
                torch.tensor([prompt]), do_sample=False, max_new_tokens=len(text), eos_token_id=None,
                attention_mask=torch.ones((1, len(prompt))), spec_config=config | {"strict": True},
                logits_processor=LogitsProcessorList([Dictation(text, len(prompt))]), return_spec_states=True,
            )  # fmt: skip
            if out.sequences[0, len(prompt) :].tolist() != text:
                print(f"{name}: another text", file=sys.stderr)
                return 1
            if repeat >= 0:
                played[name].append(out.spec_states[0].rounds)
    write(args.out, played, curve, args.stretch)
    return 0


def dictated(model, tokenizer, questions: list[Question], stretch: int) -> tuple[list[int], list[int]]:
    """A prompt that holds what will be copied, and the text in three stretches."""

    def answer(question: Question) -> list[int]:
        ids = encode(tokenizer, [{"role": "user", "content": question.turns[0]}])
        options = {"max_new_tokens": stretch, "min_new_tokens": stretch, "do_sample": False}
        return model.generate(torch.tensor([ids]), attention_mask=torch.ones((1, len(ids))), **options)[
            0, len(ids) :
        ].tolist()

    longest = max(questions, key=lambda question: len(question.turns[0]))
    source = tokenizer(longest.turns[0], add_special_tokens=False)["input_ids"]
    # passages from here and there, as items of a list
    passages = [source[start : start + 30] for start in range(0, len(source) - 30, 45)]
    newline = tokenizer("\n- ", add_special_tokens=False)["input_ids"]
    copied = [token for passage in passages for token in [*newline, *passage]]
    while len(copied) < stretch:
        copied += copied
    prompt = encode(tokenizer, [{"role": "user", "content": questions[0].turns[0] + "\n\n" + longest.turns[0]}])
    return prompt, answer(questions[0]) + copied[:stretch] + answer(questions[1])


def write(out: Path | None, played: dict[str, list[list[SpecRound]]], curve: dict[int, float], stretch: int) -> None:
    rows = []
    for place, title in enumerate(STRETCHES):
        begin = max(
            [r.start for r in rounds[1:] if r.start // stretch == place][:LATE][-1] for rounds in played[SCHEDULE]
        )
        rates: dict[str, tuple[float, float]] = {}
        for name, repeats in played.items():
            inside = Rounds()
            for rounds in repeats:
                here = [r for r in rounds[1:] if begin <= r.start < (place + 1) * stretch]
                inside.add([rounds[0], *here])
            rates[name] = (inside.priced(curve), inside.measured())
        row = [title]
        for kind in (0, 1):
            row += against_the_best({name: rate[kind] for name, rate in rates.items()})
        rows.append(row)
    head = ["stretch"]
    for name in ("priced", "measured"):
        head += [f"best size, {name}", "its tokens/s", "goodput", "ratio"]
    publish("reaction", [*table(head, rows), "", "![Sizes](reaction.png)"], out)
    if out is None:
        return
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    axes.axvspan(stretch, 2 * stretch, color="#EEEEEE")
    for number, rounds in enumerate(played[SCHEDULE]):
        places, sizes = [r.start for r in rounds[1:]], [len(r.token_ids) for r in rounds[1:]]
        axes.step(places, sizes, where="post", alpha=0.6, label=f"run {number + 1}")
    for place, title in enumerate(STRETCHES):
        axes.text((place + 0.5) * stretch, 15.6, title, ha="center", fontsize=9)
    axes.set(xlabel="token of the text", ylabel="drafted tokens", ylim=(-0.5, 17))
    axes.legend(loc="center right")
    figure.savefig(out / "reaction.png", dpi=130)


if __name__ == "__main__":
    sys.exit(main())
