"""
What each source of the drafters without a model adds, and what other readings of them would: tokens per forward on the
embedded model, for the same texts.

    python -m eval.drafter_variants [--data FILE.jsonl] [--per-category 2] [--new-tokens 128] [--nodes 15]
                                    [--out FOLDER]

Every variant drafts so many nodes in every round. Tokens per forward do not depend on what else the machine does.
"""

import argparse
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from tqdm import tqdm

import hf_specstate
from eval.data import load_questions
from eval.embedded_model import load_embedded_model
from eval.markdown import table
from eval.prompts import encode
from eval.small_pages import publish
from eval.statistics import ALL
from hf_specstate.drafting import (
    DraftContext,
    Drafter,
    DraftOutcome,
    DraftRequest,
    HistoryDrafter,
    PreviousDraftsDrafter,
    RecyclingDrafter,
)
from hf_specstate.drafting.history import MOST_CONTINUATIONS, weighted_tree
from hf_specstate.drafting.previous_drafts import rejected_branches
from hf_specstate.drafting.recycling import NOTHING, Seen, SuccessorTable
from hf_specstate.drafting.suffix_index import LONGEST_MATCH, SuffixIndex
from hf_specstate.token_tree import TokenTree

FADING = 0.7  # of what was learned about a token before, when averaging over time
BY_RANK = (0.45, 0.12, 0.06, 0.04, 0.03, 0.02, 0.015, 0.01)  # chances of a token's successors, likeliest first
REMEMBERED = 0.5  # what a match in a rejected draft is worth, beside one in the text


@dataclass
class PreviousDraftsWithout(PreviousDraftsDrafter):
    """Args: left_out (`str`): The source whose nodes are taken out."""

    left_out: str = ""

    def propose(self, request: DraftRequest) -> TokenTree:
        tree = super().propose(request)
        kept = [node for node, source in enumerate(tree.sources) if source != self.left_out]
        return tree.best(kept, len(tree), len(tree))


@dataclass
class RejectedDraftsDrafter(Drafter):
    """
    Keeps every rejected branch for the rest of the text, behind the tokens that it followed, and continues from where
    the last tokens stand in one of them: drafts in the suffix index, or (with `answers`) the pool of n-grams of
    look-ahead decoding (https://huggingface.co/papers/2402.02057), filled with what the target answered.
    """

    name: ClassVar[str] = "rejected_drafts"
    wants_answers = True
    answers: bool = False

    def start(self, context: DraftContext) -> None:
        self._sequences = context.sequences
        self._indexes = [SuffixIndex() for _ in range(context.sequences.batch_size)]

    def propose(self, request: DraftRequest) -> TokenTree:
        index = self._indexes[request.row]
        starts, lengths = index.matches(request.token_ids[-LONGEST_MATCH:], MOST_CONTINUATIONS)
        if not len(starts):
            return TokenTree()
        depth = min(request.max_depth, request.max_nodes)
        tree = weighted_tree(index.continuations(starts, depth, repeats=False), lengths, request, self.name)
        tree.confidences = [REMEMBERED * confidence for confidence in tree.confidences]
        return tree

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        for outcome in outcomes:
            text, index = self._sequences.tokens[outcome.row], self._indexes[outcome.row]
            before = text[: len(text) - 1][-LONGEST_MATCH:]
            for branch in rejected_branches(outcome):
                answered = [outcome.answers[1 + node] for node in branch]
                drafted = [outcome.tree.token_ids[node] for node in branch]
                # the answers follow the token that the target chose in place of the branch's first
                index.extend([text[-1], *answered] if self.answers else [*before[-4:], *drafted, answered[-1]])
                index.end_text()


class AveragedTable(SuccessorTable):
    """Successors by their probabilities averaged over time, in place of the most recent ones."""

    def __init__(self, k: int, device: torch.device, num_texts: int = 1):
        super().__init__(k, device, num_texts)
        self._averages: defaultdict[tuple[int, int], defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))

    def update(self, seen: Sequence[Seen]) -> None:
        [(_, pairs, logits)] = seen
        found = logits.softmax(dim=-1).topk(self.k)
        for pair, tokens, probs in zip(pairs, found.indices.tolist(), found.values.tolist(), strict=True):
            for key in (pair, (NOTHING - 1, pair[1])):
                average = self._averages[key]
                for token in average:
                    average[token] *= FADING
                for token, prob in zip(tokens, probs, strict=True):
                    average[token] += (1 - FADING) * prob

    def successors(
        self, texts: torch.Tensor, before: torch.Tensor, tokens: torch.Tensor, vocab_size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ids, probs = [], []
        for pair in zip(before[0].tolist(), tokens[0].tolist(), strict=True):
            average: Mapping[int, float] = self._averages.get(pair) or self._averages.get((NOTHING - 1, pair[1])) or {}
            best = sorted(average.items(), key=lambda item: -item[1])[: self.k]
            best += [(0, 0.0)] * (self.k - len(best))
            total = sum(average.values()) or 1.0
            ids.append([token for token, _ in best])
            probs.append([weight / total for _, weight in best])
        return torch.tensor([ids]), torch.tensor([probs])


class RankedTable(SuccessorTable):
    """Successors of which only the order is known."""

    def successors(
        self, texts: torch.Tensor, before: torch.Tensor, tokens: torch.Tensor, vocab_size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ids, probs = super().successors(texts, before, tokens, vocab_size)
        return ids, torch.tensor(BY_RANK)[: self.k] * (probs > 0)


class SingleTokenTable(SuccessorTable):
    """Successors of single tokens, never of pairs."""

    def update(self, seen: Sequence[Seen]) -> None:
        super().update([(text, [(NOTHING, token) for _, token in pairs], logits) for text, pairs, logits in seen])

    def successors(
        self, texts: torch.Tensor, before: torch.Tensor, tokens: torch.Tensor, vocab_size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return super().successors(texts, torch.full_like(before, NOTHING), tokens, vocab_size)


@dataclass
class RecyclingVariant(RecyclingDrafter):
    """Args: table (`type`): Of the table of successors."""

    table: type[SuccessorTable] = SuccessorTable

    def start(self, context: DraftContext) -> None:
        super().start(context)
        self._texts = [(self.table(self.top_k, context.input_ids.device), 0) for _ in self._texts]
        if self.table is RankedTable:
            self.trust = 1.0


HISTORY, PREVIOUS, RECYCLING = HistoryDrafter(), PreviousDraftsDrafter(), RecyclingDrafter()
VARIANTS: dict[str, list[Drafter]] = {
    "as it is": [HISTORY, PREVIOUS, RECYCLING],
    **{
        f"without {source}": [HISTORY, PreviousDraftsWithout(left_out=source), RECYCLING]
        for source in ("answer_tail", "draft_tail", "prompt_fill")
    },
    "rejected drafts are kept for the whole text": [HISTORY, PREVIOUS, RECYCLING, RejectedDraftsDrafter()],
    "answers to rejected drafts are kept (n-gram pool)": [
        HISTORY,
        PREVIOUS,
        RECYCLING,
        RejectedDraftsDrafter(answers=True),
    ],
    "the n-gram pool in place of previous_drafts": [HISTORY, RECYCLING, RejectedDraftsDrafter(answers=True)],
    "recycling: averaged over time": [HISTORY, PREVIOUS, RecyclingVariant(table=AveragedTable)],
    "recycling: by rank": [HISTORY, PREVIOUS, RecyclingVariant(table=RankedTable)],
    "recycling: single tokens": [HISTORY, PREVIOUS, RecyclingVariant(table=SingleTokenTable)],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="sample")
    parser.add_argument("--per-category", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--nodes", type=int, default=15)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model, tokenizer = load_embedded_model()
    hf_specstate.enable(model)
    rates: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in VARIANTS}
    for question in tqdm(load_questions(args.data, args.per_category)):
        ids = torch.tensor([encode(tokenizer, [{"role": "user", "content": question.turns[0]}])])
        expected = None
        for name, drafters in VARIANTS.items():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=args.new_tokens, do_sample=False,
                return_spec_states=True,
                spec_config={"drafters": drafters, "schedule": "constant", "max_nodes": args.nodes, "strict": True},
            )  # fmt: skip
            expected = out.sequences if expected is None else expected
            if not torch.equal(out.sequences, expected):
                print(f"FAULT question {question.question_id}: {name} gives another text", file=sys.stderr)
                return 1
            rate = out.spec_states[0].mean_tokens_per_forward
            if not math.isnan(rate):  # an answer of one token has no rounds
                for category in (ALL, question.category):
                    rates[name][category].append(rate)
    categories = list(rates["as it is"])
    rows = [[name, *(f"{statistics.fmean(found[c]):.2f}" for c in categories)] for name, found in rates.items()]
    publish("drafter_variants", table(["variant", *categories], rows), args.out, note=": mean tokens per forward")
    return 0


if __name__ == "__main__":
    sys.exit(main())
