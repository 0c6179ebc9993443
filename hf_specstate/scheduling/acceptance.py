"""How likely drafted tokens are accepted, as far as this generation has shown."""

import math
from bisect import bisect
from collections import defaultdict
from collections.abc import Iterator, Sequence

from ..drafting.prior import acceptance
from ..token_tree import TokenTree, names_of

BINS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)  # edges of confidence
DEPTHS = (2, 3, 5)  # from which a new class of depths begins
# how much a level is drawn to the one above it, in observations
SOURCE_PRIOR, CELL_PRIOR, ROW_PRIOR, VECTOR_PRIOR = 12.0, 20.0, 3.0, 3.0
# of what was seen, with every new observation of the same kind; a row is soon another kind of text
DECAY, ROW_DECAY = 0.99, 0.93
LEAST, MOST = 0.002, 0.98  # of a confidence: a drafter is never quite sure
FIRST_GUESS = 0.6  # acceptance at each depth, of a source that has shown nothing yet
NOWHERE = -2  # in a tree

Kind = tuple[str, int, int]  # a source, its class of confidence and of depth; EVERY where all are meant
EVERY = -1


class Tally:
    """
    What happened beside what was expected, in decaying numbers, and the `shift` of log-odds that reconciles them.

    Args:
        prior (`float`): Observations that the expectation is worth.
        seen, happened, expected (`float`): How many observations there were, how many came true, how many should have.
    """

    def __init__(self, prior: float, seen: float = 0.0, happened: float = 0.0, expected: float = 0.0):
        self.prior, self.seen, self.happened, self.expected = prior, seen, happened, expected
        self._update()

    def add(self, happened: bool, expected: float, decay: float = DECAY) -> None:
        self.seen = decay * self.seen + 1
        self.happened = decay * self.happened + happened
        self.expected = decay * self.expected + expected
        self._update()

    def _update(self) -> None:
        hits = (self.prior + self.happened) / (self.prior + self.expected)
        misses = (self.prior + self.seen - self.happened) / (self.prior + self.seen - self.expected)
        self.shift = math.log(hits / misses)


class Acceptance:
    """
    Estimates the chance that a node is accepted if its parent is. The drafter's own confidence is the beginning; its
    log-odds are shifted by what its sources have been worth, then by what nodes of just these sources, a similar
    confidence and depth have been worth beyond that, and then by how the sources have fared lately in the row at hand.
    A shift is small until much was seen, so the beginning is as cautious as the drafters.

    Every token of the text judges all proposals for its position, those too that were not verified (*shadow* scoring),
    so a source is known while speculation is off.

    Args:
        pooled (`dict[Kind, Tally]`, *optional*), vectors (`dict[tuple[str, int], list[float]]`, *optional*):
            What an earlier generation has shown; goes on from there, in place.
    """

    def __init__(
        self,
        pooled: dict[Kind, Tally] | None = None,
        vectors: dict[tuple[str, int], list[float]] | None = None,
    ):
        self.pooled: dict[Kind, Tally] = {} if pooled is None else pooled
        self._rows: defaultdict[int, dict[Kind, Tally]] = defaultdict(dict)
        # (source, depth) -> how often one of its tokens there was accepted, and how often there were any
        self.vectors: dict[tuple[str, int], list[float]] = {} if vectors is None else vectors
        # per row: proposals whose last tokens were not yet judged, with their depths, and where the text has got to
        self._open: defaultdict[int, list[tuple[TokenTree, list[int], int]]] = defaultdict(list)

    def estimate(self, row: int, tree: TokenTree) -> list[float]:
        """For every node of `tree`, the chance that it is accepted if its parent is."""
        chances, sums = [], dict.fromkeys(tree.parents, 0.0)
        for node, (parent, source, depth) in enumerate(zip(tree.parents, tree.sources, tree.depths, strict=True)):
            confidence = acceptance(tree, node)
            odds = _log_odds(confidence)
            for level, kind, _ in self._levels(row, source, confidence, depth):
                tally = level.get(kind)
                odds += tally.shift if tally is not None else 0.0
            chances.append(_chance(odds))
            sums[parent] += chances[-1]
        # one position has one token
        return [chance / max(1.0, sums[parent]) for chance, parent in zip(chances, tree.parents, strict=True)]

    def vector(self, source: str, length: int) -> list[float]:
        """
        For every depth up to `length`, the chance that the text goes on with a token that `source` drafted there, if it
        has gone with its draft so far.
        """
        chances, chance = [], FIRST_GUESS
        for depth in range(1, length + 1):
            accepted, seen = self.vectors.get((source, depth), (0.0, 0.0))
            # deeper positions are believed to be like the one above, which has been seen more often
            chance = (VECTOR_PRIOR * chance + accepted) / (VECTOR_PRIOR + seen)
            chances.append(chance)
        return chances

    def propose(self, row: int, tree: TokenTree) -> None:
        """Remembers what was proposed for the row's next tokens, to judge it by the text."""
        if len(tree):
            self._open[row].append((tree, tree.depths, -1))

    def observe(self, row: int, token_ids: Sequence[int]) -> None:
        """Judges the proposals for a row by the tokens that were committed."""
        going = []
        for tree, depths, node in self._open[row]:
            for token in token_ids:
                node = self._judge(row, tree, depths, node, token)
                if node == NOWHERE:
                    break
            else:
                going.append((tree, depths, node))
        self._open[row] = going

    def _judge(self, row: int, tree: TokenTree, depths: list[int], parent: int, token: int) -> int:
        """Learns from `token` having followed `parent`; the node that it is."""
        found, depth, hits = NOWHERE, 0, dict[str, bool]()
        for node in range(parent + 1, len(tree)):
            if tree.parents[node] == parent:
                hit, depth = tree.token_ids[node] == token, depths[node]
                self._learn(row, tree.sources[node], acceptance(tree, node), depth, hit)
                found = node if hit else found
                for name in names_of(tree.sources[node]):
                    hits[name] = hits.get(name, False) or hit
        for name, hit in hits.items():
            vector = self.vectors.setdefault((name, depth), [0.0, 0.0])
            vector[:] = DECAY * vector[0] + hit, DECAY * vector[1] + 1
        return found

    def _learn(self, row: int, source: str, confidence: float, depth: int, hit: bool) -> None:
        odds = _log_odds(confidence)
        for level, kind, prior in self._levels(row, source, confidence, depth):
            tally = level.get(kind)
            if tally is None:
                tally = level[kind] = Tally(prior)
            shift = tally.shift
            # what the levels above expected
            tally.add(hit, _chance(odds), DECAY if level is self.pooled else ROW_DECAY)
            odds += shift

    def _levels(
        self, row: int, source: str, confidence: float, depth: int
    ) -> Iterator[tuple[dict[Kind, Tally], Kind, float]]:
        """Where what is known about a kind of node stands, general things first, and how much these draw on it."""
        for name in names_of(source):
            yield self.pooled, (name, EVERY, EVERY), SOURCE_PRIOR
        kind = (source, bisect(BINS, confidence), bisect(DEPTHS, depth))
        yield self.pooled, kind, CELL_PRIOR
        yield self._rows[row], (source, EVERY, EVERY), ROW_PRIOR


def _log_odds(chance: float) -> float:
    chance = min(max(chance, LEAST), MOST)
    return math.log(chance / (1 - chance))


def _chance(log_odds: float) -> float:
    return min(1 / (1 + math.exp(-log_odds)), MOST)
