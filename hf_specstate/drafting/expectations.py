"""What earlier rounds say about the tokens that an assistant is about to draft, and how far to believe it."""

from collections.abc import Sequence
from dataclasses import dataclass

from .base import DraftContext, DraftOutcome
from .suffix_index import LONGEST_MATCH, SuffixIndex

RATE = 0.05  # at which weights follow what happens, after
WARM_UP = 8  # guesses that the weight to begin with is worth
LEAST = 0.01  # of a weight, from which it can still recover
USED_FROM = 0.02  # a source with less is only watched
SHORTEST_MATCH = 2  # tokens, for the text to be expected to go on as it did before
LONGEST_GUESS = 16


def answer_tail(outcome: DraftOutcome) -> list[int]:
    """
    What the target answered after the mismatch of a round, along the rest of the draft: a guess at what follows the
    tokens that were committed. Empty if the whole draft was accepted.
    """
    node = outcome.accepted[-1] if outcome.accepted else -1
    tail: list[int] = []
    if outcome.answers and len(outcome.accepted) == len(outcome.token_ids):
        tail.append(outcome.answers[1 + node])  # the last token was drafted: this is no guess
    while True:
        children = [child for child, parent in enumerate(outcome.tree.parents) if parent == node]
        if not children or not outcome.answers:
            return tail
        node = children[0]  # the draft's own first choice
        tail.append(outcome.answers[1 + node])


@dataclass
class Expectation:
    """That `token` comes next, for a reason that has proved worth `weight`."""

    source: str
    token: int
    weight: float


class Expectations:
    """
    Guesses at the tokens of each row, from two sources: the `answer_tail` of the last round, position by position, and
    `history`, how the text went on where its last tokens had occurred before, while the draft follows that. A source's
    weight is the share of the tokens that it explains better than the assistant alone: with weight w, the assistant's
    probability q of the guess, and r = w / (w + (1 - w) q) if the guess was right, else 0, w moves towards r (one step
    of expectation maximisation for the mixture (1 - w) q + w). It goes to zero for guesses that are wrong.

    Args:
        context ([`DraftContext`]): The generation.
        weight (`float`): To begin with.
        sources (`tuple[str]`): The sources that are asked; of two that guess, the one with more weight.
    """

    def __init__(self, context: DraftContext, weight: float, sources: tuple[str, ...]):
        self._sequences = context.sequences
        self.weights = dict.fromkeys(sources, weight)
        self._seen = dict.fromkeys(sources, 0)
        batch_size = context.sequences.batch_size
        self._tails: list[list[int]] = [[] for _ in range(batch_size)]
        self._continuations: list[list[int] | None] = [None] * batch_size  # None: not looked up in this round
        self._indexes = [SuffixIndex() for _ in range(batch_size)]
        if "history" in sources:
            for index, tokens in zip(self._indexes, context.sequences.tokens, strict=True):
                index.extend(tokens)
        self._noted: list[list[tuple[list[int], Expectation, float]]] = [[] for _ in range(batch_size)]

    def next(self, row: int, path: list[int]) -> Expectation | None:
        """What is expected after the committed tokens of `row` and the drafted `path`."""
        found = []
        if "answer_tail" in self.weights and len(path) < len(self._tails[row]):
            found.append(self._expectation("answer_tail", self._tails[row][len(path)]))
        if "history" in self.weights:
            continuation = self._continuation(row)
            if len(path) < len(continuation) and continuation[: len(path)] == path:
                found.append(self._expectation("history", continuation[len(path)]))
        return max(found, key=lambda expectation: self.weights[expectation.source], default=None)

    def note(self, row: int, path: list[int], expectation: Expectation, q: float) -> None:
        """Remembers a guess, and how likely the assistant by itself found it, until the outcome is known."""
        self._noted[row].append((path, expectation, q))

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        for outcome in outcomes:
            row, tokens = outcome.row, outcome.token_ids
            for path, expectation, q in self._noted[row]:
                if len(path) < len(tokens) and tokens[: len(path)] == path:
                    self._learn(expectation, expectation.token == tokens[len(path)], q)
            self._noted[row].clear()
            self._tails[row] = answer_tail(outcome)
            self._continuations[row] = None
            if "history" in self.weights:
                self._indexes[row].extend(tokens)

    def _expectation(self, source: str, token: int) -> Expectation:
        weight = self.weights[source]
        return Expectation(source, token, weight if weight >= USED_FROM else 0.0)

    def _continuation(self, row: int) -> list[int]:
        known = self._continuations[row]
        if known is None:
            index, known = self._indexes[row], []
            starts, lengths = index.matches(self._sequences.tokens[row][-LONGEST_MATCH:], limit=1)
            if len(starts) and lengths[0] >= SHORTEST_MATCH:
                known = index.continuations(starts, LONGEST_GUESS, repeats=True)[0].tolist()
            self._continuations[row] = known
        return known

    def _learn(self, expectation: Expectation, was_right: bool, q: float) -> None:
        weight = self.weights[expectation.source]
        explained = weight / (weight + (1 - weight) * q) if was_right else 0.0
        rate = max(RATE, 1 / (WARM_UP + self._seen[expectation.source]))
        self._seen[expectation.source] += 1
        self.weights[expectation.source] = max(LEAST, weight + rate * (explained - weight))
