"""Drafting from the previous round: what was drafted then, and what the target answered to it."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..token_tree import TokenTree, names_of
from .base import DraftContext, Drafter, DraftOutcome, DraftRequest
from .suffix_index import LONGEST_MATCH, SuffixIndex

MOST_BRANCHES = 4
# how likely the first token of each kind of tail is accepted, and how much less likely each further one is
ANSWER_TAIL, SUBSTITUTED, REALIGNED, INSERTED, PROMPT_FILL, ANYTHING = 0.05, 0.02, 0.2, 0.01, 0.1, 0.005
FADING = 0.85


@dataclass
class PreviousDraftsDrafter(Drafter):
    """
    Uses what a verified draft d₁ … d_K leaves behind when the target accepts a of its tokens and adds one of its own.
    Its answers y to the nodes after the mismatch are guesses at the same positions (Jacobi iteration,
    https://huggingface.co/papers/2305.10427), and the rest of the draft may still hold, in place or shifted. Sources:

    - `answer_tail`: y_{a+2} …, what the target said there, although the token before was another;
    - `draft_tail`: d_{a+2} … if one token was replaced, d_{a+1} … if one was inserted, and what follows the added token
      wherever it occurs in the rest of the draft (tokens were left out);
    - `prompt_fill`: how the prompt went on after the last tokens of such a tail, or of the text. When there is nothing
      at all, a piece of the prompt, from anywhere: what the target answers to it are the next round's tails.

    In a tree, the tails of every branch beside the accepted path count.

    Args:
        fill (`bool`, *optional*, defaults to `True`): Use the prompt.
    """

    name: ClassVar[str] = "previous_drafts"
    wants_answers = True
    fill: bool = True

    def start(self, context: DraftContext) -> None:
        self._last = [DraftOutcome(row, TokenTree(), [], []) for row in range(context.sequences.batch_size)]
        self._random = [random.Random(0) for _ in range(context.sequences.batch_size)]
        self._prompts = [SuffixIndex() for _ in range(context.sequences.batch_size)]
        for row, index in enumerate(self._prompts):
            index.extend(context.encoder_tokens(row) or context.draftable(context.sequences.prompt(row)))

    def propose(self, request: DraftRequest) -> TokenTree:
        tree = TokenTree()
        depth = min(request.max_nodes, request.max_depth)
        outcome = self._last[request.row]
        for branch in rejected_branches(outcome):
            for source, confidence, tail in tails(outcome, branch):
                _add_path(tree, tail[:depth], source, confidence)
                if self.fill and tail and len(tail) < depth:
                    filled = self._continued(request.row, tail, depth - len(tail))
                    _add_path(tree, [*tail, *filled], "prompt_fill", PROMPT_FILL, skip=len(tail))
        if self.fill:
            _add_path(tree, self._continued(request.row, request.token_ids, depth), "prompt_fill", PROMPT_FILL)
        if self.fill and not len(tree):
            _add_path(tree, self._piece(request.row, depth), "prompt_fill", ANYTHING)
        return tree

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        for outcome in outcomes:
            self._last[outcome.row] = outcome

    def _continued(self, row: int, last_tokens: list[int], length: int) -> list[int]:
        """How the prompt went on where most of `last_tokens` had occurred."""
        starts, _ = self._prompts[row].matches(last_tokens[-LONGEST_MATCH:], limit=1)
        if not len(starts):
            return []
        return self._prompts[row].tokens[int(starts[0]) :][:length].tolist()

    def _piece(self, row: int, length: int) -> list[int]:
        prompt = self._prompts[row].tokens
        start = self._random[row].randrange(max(1, len(prompt) - length))
        return prompt[start : start + length].tolist()


def rejected_branches(outcome: DraftOutcome) -> Iterator[list[int]]:
    """The chains of nodes that start beside the last committed token, most likely first; of a fork, each way."""
    tree = outcome.tree
    if not outcome.answers or len(outcome.accepted) == len(outcome.token_ids):
        return  # the target added no token of its own: nothing was contradicted
    last = outcome.accepted[-1] if outcome.accepted else -1
    parents = set(tree.parents)
    leaves = [node for node in range(len(tree)) if node not in parents]
    found = 0
    for leaf in leaves:
        path = tree.path_to(leaf)
        begin = 0 if last < 0 else path.index(last) + 1 if last in path else None
        if begin is None or begin == len(path):
            continue
        yield path[begin:]
        found += 1
        if found == MOST_BRANCHES:
            return


def tails(outcome: DraftOutcome, branch: list[int]) -> Iterator[tuple[str, float, list[int]]]:
    """`(source, confidence, tokens)` of every way in which `branch` may go on after the token that the target added."""
    drafted = [outcome.tree.token_ids[node] for node in branch]
    added = outcome.token_ids[-1]
    yield "answer_tail", ANSWER_TAIL, [outcome.answers[1 + node] for node in branch]
    if added in drafted:
        yield "draft_tail", REALIGNED, drafted[drafted.index(added) + 1 :]
    yield "draft_tail", SUBSTITUTED, drafted[1:]
    yield "draft_tail", INSERTED, drafted


def _add_path(tree: TokenTree, path: list[int], source: str, confidence: float, skip: int = 0) -> None:
    """Adds a chain of guesses, the later the less likely; its first `skip` tokens only if they are missing."""
    parent = -1
    for place, token in enumerate(path):
        node = tree.child(parent, token)
        if node is None:
            node = tree.add(token, parent, source, confidence=confidence * FADING ** max(place - skip, 0))
        elif source not in names_of(tree.sources[node]) and place >= skip:
            tree.sources[node] += f"+{source}"
            tree.confidences[node] = max(tree.confidences[node], confidence * FADING ** (place - skip))
        parent = node
