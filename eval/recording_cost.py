"""
What recording the speculative states costs, on the embedded model at batch size 1: time of the recorder as a share of
the rounds, and memory of the states, for each level.

    python -m eval.recording_cost [--nodes 8] [--tree-width 1] [--new-tokens 256] [--out FILE.md]

Run it alone on the machine. The levels take turns, several times over; the recorder is timed inside the same rounds.
"""

import argparse
import functools
import statistics
import sys
import time
import tracemalloc
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

import hf_specstate
from eval.config import without_folders
from eval.embedded_model import load_embedded_model
from eval.environment import environment
from eval.markdown import table
from hf_specstate.decoding import SpeculativeDecoding
from hf_specstate.recording import Recorder
from hf_specstate.state_files import TENSORS, from_bytes, to_bytes

PROMPT = "Write the numbers from one to twenty as words, then write them again in the same order, then once more."
LEVELS = ("off", "ids", "topk", "full")
REPEATS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--tree-width", type=int, default=1)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model, tokenizer = load_embedded_model()
    hf_specstate.enable(model)
    chat = [{"role": "user", "content": PROMPT}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)

    def generate(level: str):
        config = {"schedule": "constant", "max_nodes": args.nodes, "tree_width": args.tree_width}
        config["record"] = "ids" if level == "off" else level
        return model.generate(
            **inputs, spec_config=config, return_spec_states=level != "off", max_new_tokens=args.new_tokens,
            do_sample=False, eos_token_id=None,
        )  # fmt: skip

    seconds = defaultdict(list)
    watch = Watch()
    for _ in range(1 + REPEATS):  # the first one warms up
        for level in LEVELS:
            watch.clear()
            generate(level)
            seconds[level].append((watch.recorder, watch.rounds))
    rows = []
    for level in LEVELS:
        shares = [recorder / rounds for recorder, rounds in seconds[level][1:]]
        milliseconds = 1e3 * statistics.median(rounds for _, rounds in seconds[level][1:])
        memory = memory_per_token(generate, level, args.new_tokens) if level != "off" else (0.0, 0.0)
        rows.append(
            [level, f"{statistics.median(shares):.2%}", f"{max(shares):.2%}", f"{milliseconds:.0f}"]
            + [f"{1000 * size / 1024:.0f}" for size in memory]
        )
    header = ["level", "recorder / rounds", "at worst", "rounds, ms", "KiB per 1,000 tokens", "KiB in a file"]
    command = " ".join(["python -m eval.recording_cost", *map(without_folders, sys.argv[1:])])
    told = environment(model)
    machine = ", ".join(f"{name} {told[name]}" for name in ("torch", "transformers", "cpu", "threads", "dtype"))
    text = "\n".join([f"`{command}`", "", machine, "", *table(header, rows), ""])
    print(text)
    if args.out is not None:
        args.out.write_text(text)


class Watch:
    """Seconds spent in the recorder and in rounds since it was cleared."""

    def __init__(self):
        self.clear()
        for name in ("add", "end"):
            setattr(Recorder, name, self._timed(getattr(Recorder, name), "recorder"))
        method: Any = SpeculativeDecoding
        method.spec_round = self._timed(method.spec_round, "recorder")
        method.round = self._timed(method.round, "rounds")

    def clear(self) -> None:
        self.recorder = self.rounds = 0.0

    def _timed(self, function, part: str):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                setattr(self, part, getattr(self, part) + time.perf_counter() - start)

        return wrapper


def memory_per_token(generate, level: str, new_tokens: int) -> tuple[float, float]:
    """Bytes a new token: of the states in memory (Python objects and tensors), and in a file."""
    states = generate(level).spec_states
    data = to_bytes(states)
    del states
    tracemalloc.start()
    states = from_bytes(data)
    objects, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    tensors = {}
    for spec_round in (spec_round for sequence in states for spec_round in sequence):
        for name in TENSORS:
            tensor = getattr(spec_round, name)
            if isinstance(tensor, torch.Tensor):
                tensors[spec_round.index, name] = tensor.numel() * tensor.element_size()
    return (objects + sum(tensors.values())) / new_tokens, len(data) / new_tokens


if __name__ == "__main__":
    main()
