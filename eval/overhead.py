"""
How much of a speculative round is not a model forward, on the embedded model at batch size 1 with 8 nodes.

    python -m eval.overhead [--tree-width 2] [--assistant] [--rounds 60]

Run it alone on the machine. Forwards are timed inside the same run, by a wrapper around `forward`.
"""

import argparse
import functools
import statistics
import time

import torch

import hf_specstate
from eval.embedded_model import layer_skipping_draft, load_embedded_model
from hf_specstate.decoding import SpeculativeDecoding

PROMPT = "Write the numbers from one to twenty as words, then write them again in the same order, then once more."


def timed(function, seconds: list[float]):
    """`function`, which then appends how long each call took."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - start)

    return wrapper


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree-width", type=int, default=1)
    parser.add_argument("--assistant", action="store_true", help="draft with the 29-layer draft")
    parser.add_argument("--new-tokens", type=int, default=128)
    args = parser.parse_args()
    model, tokenizer = load_embedded_model()
    assistant = layer_skipping_draft(model) if args.assistant else None
    chat = [{"role": "user", "content": PROMPT}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    forwards: list[float] = []
    rounds: list[float] = []
    model.forward = timed(model.forward, forwards)
    if assistant is not None:
        assistant.forward = timed(assistant.forward, forwards)
    original = SpeculativeDecoding.round
    shares: list[float] = []

    def measured_round(self) -> None:
        forwards.clear()
        start = time.perf_counter()
        original(self)
        rounds.append(time.perf_counter() - start)
        shares.append(1 - sum(forwards) / rounds[-1])

    SpeculativeDecoding.round = measured_round  # type: ignore[method-assign]
    hf_specstate.enable(model)
    config = {"schedule": "constant", "max_nodes": 8, "tree_width": args.tree_width}
    options = {"max_new_tokens": args.new_tokens, "do_sample": False, "eos_token_id": None, "spec_config": config}
    with torch.no_grad():
        model.generate(**inputs, assistant_model=assistant, **options)
    total = sum(share * seconds for share, seconds in zip(shares, rounds, strict=True)) / sum(rounds)
    print(
        f"{len(rounds)} rounds, {1e3 * statistics.median(rounds):.1f} ms each (median); outside forwards "
        f"{100 * total:.2f} % of the time ({1e3 * total * sum(rounds) / len(rounds):.2f} ms a round)"
    )


if __name__ == "__main__":
    main()
