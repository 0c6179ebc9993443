"""
Two ways to find where the last tokens of a text occurred before: the package's index (places of every token, compared
backwards with NumPy) and a suffix automaton (Blumer et al., 1985), which follows the longest match from token to token.

    python -m eval.suffix_structures [--data FILE.jsonl] [--tokens 100000] [--out FILE.md]

Run it alone on the machine. Both read the same tokens of the embedded model's tokenizer.
"""

import argparse
import itertools
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from eval.config import without_folders
from eval.data import load_questions
from eval.embedded_model import embedded_model_path
from eval.markdown import table
from hf_specstate.drafting.suffix_index import LONGEST_MATCH, SuffixIndex

LOOKUPS = 500


class SuffixAutomaton:
    """The states of all substrings; `end` of a state is a place where they end."""

    def __init__(self):
        self.next: list[dict[int, int]] = [{}]
        self.link, self.length, self.end = [-1], [0], [-1]
        self.last, self.size = 0, 0
        self.matched, self.match_length = 0, 0  # the longest suffix of the text that occurred before

    def extend(self, token: int) -> None:
        self._follow(token)
        new = self._state({}, self.length[self.last] + 1, self.size)
        state = self.last
        while state >= 0 and token not in self.next[state]:
            self.next[state][token] = new
            state = self.link[state]
        if state < 0:
            self.link[new] = 0
        else:
            target = self.next[state][token]
            if self.length[target] == self.length[state] + 1:
                self.link[new] = target
            else:
                clone = self._state(dict(self.next[target]), self.length[state] + 1, self.end[target])
                self.link[clone] = self.link[target]
                while state >= 0 and self.next[state].get(token) == target:
                    self.next[state][token] = clone
                    state = self.link[state]
                self.link[target] = self.link[new] = clone
        self.last, self.size = new, self.size + 1

    def _follow(self, token: int) -> None:
        while self.matched > 0 and token not in self.next[self.matched]:
            self.matched = self.link[self.matched]
            self.match_length = self.length[self.matched]
        if token in self.next[self.matched]:
            self.matched, self.match_length = self.next[self.matched][token], self.match_length + 1

    def _state(self, following: dict[int, int], length: int, end: int) -> int:
        self.next.append(following)
        self.link.append(0)
        self.length.append(length)
        self.end.append(end)
        return len(self.next) - 1

    def match(self) -> tuple[int, int]:
        """Where the longest match ended, and how long it is."""
        return self.end[self.matched], self.match_length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="sample")
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(embedded_model_path())
    texts = ["\n".join(question.turns) for question in load_questions(args.data, None)]
    stream = list(itertools.chain.from_iterable(tokenizer(texts)["input_ids"]))
    while len(stream) < args.tokens:
        stream += [(token + 1) % len(tokenizer) for token in stream]
    stream = stream[: args.tokens]
    index, automaton = SuffixIndex(), SuffixAutomaton()
    ways: dict[str, tuple[Callable[[int], Any], Callable[[int], Any]]] = {
        "index": (
            lambda token: index.extend([token]),
            lambda place: index.matches(stream[place - LONGEST_MATCH : place], limit=32),
        ),
        "automaton": (automaton.extend, lambda place: automaton.match()),
    }
    rows = []
    for name, (extend, look_up) in ways.items():
        first = len(stream) - LOOKUPS
        tracemalloc.start()
        for token in stream[:first]:
            extend(token)
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        learning, looking = [], []
        for place in range(first, len(stream)):
            start = time.perf_counter()
            extend(stream[place])
            learning.append(1e6 * (time.perf_counter() - start))
            start = time.perf_counter()
            look_up(1 + place)
            looking.append(1e6 * (time.perf_counter() - start))
        per_million = 1e6 * held / first / 2**20
        rows.append(
            [name, *(f"{statistics.median(values):.1f}" for values in (learning, looking)), f"{per_million:.0f}"]
        )
    head = ["structure", "µs to learn a token", "µs to look up", "MiB per million tokens"]
    command = " ".join(["python -m eval.suffix_structures", *map(without_folders, sys.argv[1:])])
    note = "The index finds the 32 best places with their lengths, the automaton one place of the longest match."
    text = "\n".join([f"`{command}`, {len(stream):,} tokens (medians)", "", *table(head, rows), "", note, ""])
    print(text)
    if args.out is not None:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
