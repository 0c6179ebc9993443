"""
What drafting without a model costs: milliseconds to propose 15 nodes for a row and to learn from the outcome, on texts
of the embedded model's tokenizer, with a long history from earlier calls; what of it goes into deciding how much to
draft; and the memory of that history.

    python -m eval.proposing_cost [--data FILE.jsonl] [--history-tokens 100000] [--out FILE.md]

Run it alone on the machine. No forward is made: the text is given, and the scores that `recycling` learns from are
random.
"""

import argparse
import itertools
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoTokenizer, GenerationConfig, LogitsProcessorList

from eval.config import without_folders
from eval.data import load_questions
from eval.embedded_model import embedded_model_path
from eval.markdown import table
from eval.methods.specstate import MIXTURE
from eval.replay import walk
from hf_specstate import DRAFTERS, DraftHistory, SpecStateConfig
from hf_specstate.candidate_generator import SpecStateCandidateGenerator
from hf_specstate.draft_history import HistoryOfRows
from hf_specstate.drafting import DraftContext, DraftOutcome
from hf_specstate.scheduling import Acceptance, GoodputSchedule, RoundCost, RoundTimes
from hf_specstate.sequences import Sequences

NODES = 15
PROMPT_TOKENS = 300
ROUNDS = 150


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="sample")
    parser.add_argument("--history-tokens", type=int, default=100_000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(embedded_model_path())
    texts = ["\n".join(question.turns) for question in load_questions(args.data, None)]
    stream = list(itertools.chain.from_iterable(tokenizer(texts)["input_ids"]))
    while len(stream) < args.history_tokens:  # shifted, so that nothing is simply found again
        stream += [(token + 1) % len(tokenizer) for token in stream]
    tracemalloc.start()
    history = DraftHistory(max_tokens=10 * args.history_tokens)
    for start in range(0, args.history_tokens, 500):
        history.add(stream[start : start + 500])
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    rows = []
    for drafters in ([name] for name in MIXTURE):
        rows.append(timed(drafters, stream, history, len(tokenizer)))
    rows.append(timed(MIXTURE, stream, history, len(tokenizer)))
    lines = table(
        ["drafters", "proposing, ms (median)", "95th percentile", "learning, ms (median)", "of these, deciding"], rows
    )
    command = " ".join(["python -m eval.proposing_cost", *map(without_folders, sys.argv[1:])])
    per_million = 1e6 * held / len(history) / 2**20
    memory = f"{len(history):,} tokens of history take {held / 2**20:.1f} MiB, {per_million:.0f} MiB per million."
    text = "\n".join([f"`{command}`", "", *lines, "", memory, ""])
    print(text)
    if args.out is not None:
        args.out.write_text(text)


class Stopwatch:
    """Adds up the time of calls."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def around(self, call: Callable) -> Callable:
        def timed_call(*args, **kwargs):
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._seconds += time.perf_counter() - start

        return timed_call

    def reset(self) -> float:
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def timed(names: list[str], stream: list[int], history: DraftHistory, vocab_size: int) -> list[str]:
    """One line of the table."""
    prompt, output = stream[:PROMPT_TOKENS], stream[PROMPT_TOKENS:]
    model: Any = SimpleNamespace(
        config=SimpleNamespace(get_text_config=lambda decoder: SimpleNamespace(vocab_size=vocab_size))
    )
    context = DraftContext(
        model=model,
        sequences=Sequences(torch.tensor([prompt]), None, pad_token_id=0),
        config=SpecStateConfig(strict=True),
        generation_config=GenerationConfig(max_length=10**6),
        logits_processor=LogitsProcessorList(),
        input_ids=torch.tensor([prompt]),
        model_kwargs={},
        acceptance=Acceptance(),
        draft_history=HistoryOfRows(history, 1, 1, vocab_size),
    )
    # forwards that cost the same however wide they are: everything is drafted
    cost = RoundCost({1: 1.0, 1 + NODES: 1.0})
    schedule = GoodputSchedule(NODES, False, False, True, context.acceptance, cost)
    candidates = SpecStateCandidateGenerator(context, [DRAFTERS[name]() for name in names], schedule)
    decisions = Stopwatch()
    for owner, methods in (
        (context.acceptance, ("estimate", "propose", "observe")),
        (schedule, ("ask", "asked", "choose", "observe_times")),
    ):
        for method in methods:
            setattr(owner, method, decisions.around(getattr(owner, method)))
    scores = torch.randn((1 + NODES, vocab_size), generator=torch.Generator().manual_seed(0))
    proposing, learning, deciding, place = [], [], [], 0
    for _ in range(ROUNDS):
        start = time.perf_counter()
        [tree] = candidates.propose([0])
        proposing.append(1e3 * (time.perf_counter() - start))
        accepted = walk(tree, output[place:])
        tokens = output[place : place + len(accepted) + 1]
        place += len(tokens)
        for token in tokens:
            context.sequences.commit(0, token)
        answers = [output[place]] * (1 + len(tree))
        outcome = DraftOutcome(0, tree, accepted, tokens, answers, scores[: 1 + len(tree)])
        start = time.perf_counter()
        candidates.observe([outcome])
        learning.append(1e3 * (time.perf_counter() - start))
        schedule.observe_times(RoundTimes(1 + len(tree), 1.0, 0.0))
        deciding.append(1e3 * decisions.reset())
    figures = (
        statistics.median(proposing),
        statistics.quantiles(proposing, n=20)[-1],
        statistics.median(learning),
        statistics.median(deciding),
    )
    return [" + ".join(names), *(f"{milliseconds:.2f}" for milliseconds in figures)]


if __name__ == "__main__":
    main()
