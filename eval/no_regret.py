"""
What speculation costs where it cannot pay: adversarial inputs and assistants on the embedded model, against plain
`generate()`, one after the other, in changing order.

    python -m eval.no_regret [--data FILE.jsonl] [--repeats 3] [--only NAME,NAME] [--out FOLDER]

A ratio of 1 is as fast as plain decoding, more is faster. Prefills are included, an assistant's too. Every row is
given with this package's faster products for few rows and without them (`few_rows=False`), as they could make up for a
loss. Alone on the machine.
"""

import argparse
import copy
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import LlamaForCausalLM, PreTrainedModel

import hf_specstate
from eval.data import load_questions
from eval.embedded_model import load_embedded_model
from eval.markdown import table
from eval.prompts import encode, left_padded
from eval.small_pages import publish
from hf_specstate import DraftHistory


@dataclass
class Case:
    """
    Args:
        name (`str`): What is adverse.
        inputs (`dict`): Of `generate()`.
        new_tokens (`int`): At most so many.
        options (`dict`): For the speculating call alone.
    """

    name: str
    inputs: dict[str, torch.Tensor]
    new_tokens: int
    options: dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="sample")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", type=lambda text: text.split(","))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model, tokenizer = load_embedded_model()
    hf_specstate.enable(model)
    cases = [case for case in make_cases(model, tokenizer, args.data) if args.only is None or case.name in args.only]
    ratios: dict[tuple[str, bool], list[float]] = {}
    for repeat in tqdm(range(-1, args.repeats), desc="repeats; the first one warms up"):
        for number, case in enumerate(tqdm(cases, leave=False)):
            if repeat < 0 and case.new_tokens > 128:
                continue
            calls: list[tuple[Any, dict[str, Any]]] = [("plain", {})] + [
                (few_rows, case.options | {"spec_config": {"few_rows": few_rows, "strict": True}})
                for few_rows in (True, False)
            ]
            turn = (number + repeat) % len(calls)
            seconds, texts = {}, {}
            for name, options in calls[turn:] + calls[:turn]:
                if "draft_history" in options:  # it would hold the answer the next time
                    options = options | {"draft_history": copy.deepcopy(options["draft_history"])}
                start = time.perf_counter()
                texts[name] = model.generate(
                    **case.inputs,
                    **options,
                    do_sample=False,
                    max_new_tokens=case.new_tokens,
                )
                seconds[name] = time.perf_counter() - start
            for few_rows in (True, False):
                if not torch.equal(texts[few_rows], texts["plain"]):
                    print(f"{case.name}: another text", file=sys.stderr)
                    return 1
                if repeat >= 0:
                    ratios.setdefault((case.name, few_rows), []).append(seconds["plain"] / seconds[few_rows])
    write(args.out, cases, ratios)
    return 0


def make_cases(model: PreTrainedModel, tokenizer, data: str) -> list[Case]:
    questions = load_questions(data, 8)
    prompts: dict[str, list[list[int]]] = {}
    for question in questions:
        ids = encode(tokenizer, [{"role": "user", "content": question.turns[0]}])
        prompts.setdefault(question.category, []).append(ids)
    first, *others = prompts.values()  # in Spec-Bench, open questions
    prose = left_padded(first[:1], 0, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    random_tokens = torch.randint(100, 40000, (1, 300), generator=generator)
    foreign = DraftHistory()  # of another language, if the questions have one, else of other questions
    for ids in prompts.get("translation", sum(others, [])):
        foreign.add(ids)
    config = copy.deepcopy(model.config)
    torch.manual_seed(0)
    as_slow = LlamaForCausalLM(config).eval()
    config = copy.deepcopy(config)
    config.num_hidden_layers = 2
    small = LlamaForCausalLM(config).eval()
    cases = [
        Case("random tokens", {"input_ids": random_tokens, "attention_mask": torch.ones_like(random_tokens)}, 128, {}),
        Case("a history in another language", prose, 128, {"draft_history": foreign}),
        Case("batch of 8", left_padded((first * 8)[:8], 0, torch.device("cpu")), 128, {}),
    ]
    for name, assistant in (
        ("a random assistant of 2 layers", small),
        ("a random assistant as slow as the target", as_slow),
    ):
        for new_tokens in (128, 512):
            cases.append(Case(f"{name}, {new_tokens} tokens", prose, new_tokens, {"assistant_model": assistant}))
    return cases


def write(out: Path | None, cases: list[Case], ratios: dict[tuple[str, bool], list[float]]) -> None:
    def cell(values: list[float]) -> str:
        return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"

    rows = [[case.name, *(cell(ratios[case.name, few_rows]) for few_rows in (True, False))] for case in cases]
    head = ["adverse", "speed against plain, median (range)", "with torch's own products"]
    publish("no_regret", table(head, rows), out)


if __name__ == "__main__":
    sys.exit(main())
