"""Drafting from what was written before: in this text, in the batch's other rows, in earlier calls."""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..token_tree import TokenTree
from .base import DraftContext, Drafter, DraftOutcome, DraftRequest
from .suffix_index import LONGEST_MATCH, SEPARATOR, SuffixIndex

MOST_CONTINUATIONS = 32  # that vote
# a place where one more of the last tokens occurred has so many times the vote
VOTE_BASE = 3.0


def reliability(match_length: float) -> float:
    """How often a text goes on as it did where so many of its last tokens had occurred, all votes agreeing."""
    return 0.92 - 0.65 * math.exp(-match_length / 3.0)


@dataclass
class HistoryDrafter(Drafter):
    """
    Continues the text as it, or others, went on after the same last tokens (suffix decoding,
    https://huggingface.co/papers/2411.04975). All earlier places vote with the length of their match, so that a tree of
    weighted continuations comes out; the more votes agree and the longer they match, the surer a node.

    Args:
        share_rows (`bool`, *optional*, defaults to `False`):
            Let the rows of a batch learn from each other's texts (those of one tenant, if there are tenants).
    """

    name: ClassVar[str] = "history"
    share_rows: bool = False

    def start(self, context: DraftContext) -> None:
        self._indexes = [SuffixIndex() for _ in range(context.sequences.batch_size)]
        for row, index in enumerate(self._indexes):
            if source := context.encoder_tokens(row):
                index.extend(source)
                index.end_text()
            index.extend(context.draftable(context.sequences.tokens[row]))
        self._earlier = context.draft_history

    def propose(self, request: DraftRequest) -> TokenTree:
        depth = min(request.max_depth, request.max_nodes)
        last_tokens = request.token_ids[-LONGEST_MATCH:]
        found = [_look_up(self._indexes[request.row], last_tokens, depth, repeats=True)]
        if self.share_rows:
            found += [
                _look_up(index, last_tokens, depth, repeats=False)
                for row, index in enumerate(self._indexes)
                if row != request.row and (self._earlier is None or self._earlier.is_shared(row, request.row))
            ]
        if self._earlier is not None:
            with self._earlier.reading(request.row) as index:
                found.append(_look_up(index, last_tokens, depth, repeats=False))
        continuations = np.concatenate([tokens for tokens, _ in found])
        lengths = np.concatenate([lengths for _, lengths in found])
        if not len(lengths):
            return TokenTree()
        best = np.argsort(-lengths, kind="stable")[:MOST_CONTINUATIONS]
        return weighted_tree(continuations[best], lengths[best], request, self.name)

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        for outcome in outcomes:
            self._indexes[outcome.row].extend(outcome.token_ids)


def _look_up(index: SuffixIndex, last_tokens: list[int], depth: int, repeats: bool) -> tuple[np.ndarray, np.ndarray]:
    starts, lengths = index.matches(last_tokens, MOST_CONTINUATIONS)
    return index.continuations(starts, depth, repeats), lengths


def weighted_tree(continuations: np.ndarray, lengths: np.ndarray, request: DraftRequest, source: str) -> TokenTree:
    """
    The likeliest nodes of the tree of `continuations`.

    Args:
        continuations (`np.ndarray` of shape `(places, depth)`): Tokens, padded with separators.
        lengths (`np.ndarray` of shape `(places,)`): How many of the last tokens matched at each place.
        request ([`DraftRequest`]): The limits.
        source (`str`): Of the nodes.
    """
    tree = TokenTree()
    rows: list[list[int]] = continuations.tolist()
    matched: list[int] = lengths.tolist()
    most = max(matched)
    votes = [VOTE_BASE ** (length - most) for length in matched]
    # (-chance, order of arrival, parent, token, confidence, places that went this way)
    waiting: list[tuple[float, int, int, int, float, list[int]]] = []
    arrivals = 0

    def offer(parent: int, chance: float, depth: int, places: list[int]) -> None:
        nonlocal arrivals
        by_token: dict[int, list[int]] = {}
        for place in places:
            if depth < len(rows[place]) and rows[place][depth] != SEPARATOR:
                by_token.setdefault(rows[place][depth], []).append(place)
        total = sum(votes[place] for place in places)
        shares = {token: sum(votes[place] for place in members) / total for token, members in by_token.items()}
        for token in sorted(shares, key=lambda token: -shares[token])[: request.width]:
            members = by_token[token]
            confidence = shares[token] * reliability(max(matched[place] for place in members) + depth)
            heapq.heappush(waiting, (-chance * confidence, arrivals, parent, token, confidence, members))
            arrivals += 1

    offer(-1, 1.0, 0, list(range(len(rows))))
    depths = [0]
    while waiting and len(tree) < request.max_nodes:
        chance, _, parent, token, confidence, members = heapq.heappop(waiting)
        node = tree.add(token, parent, source, confidence=confidence)
        depths.append(depths[parent + 1] + 1)
        if depths[-1] < request.max_depth:
            offer(node, -chance, depths[-1], members)
    return tree
