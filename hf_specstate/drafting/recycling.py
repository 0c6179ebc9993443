"""Drafting from what the target thought likely after a token the last time that it saw one."""

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import ClassVar

import torch
from torch.nn.functional import pad

from ..host import to_host
from ..token_tree import TokenTree
from .base import DraftContext, Drafter, DraftOutcome, DraftRequest

DEPTH = 6  # of trees
PLACES = 2**16
NOTHING = -1


class SuccessorTable:
    """
    For tokens and for pairs of tokens, the target's `k` likeliest next tokens when it last came by, with their
    probabilities. Lies on the target's device and takes `65,536 * (8 + 8 * k)` bytes there, whatever the vocabulary:
    what falls into the place of something else replaces it. Threads may share it.

    Args:
        k (`int`): Successors of each.
        device (`torch.device`): Of the target's logits.
    """

    def __init__(self, k: int, device: torch.device):
        self.k = k
        self.keys = torch.full((PLACES,), NOTHING, dtype=torch.long, device=device)  # what each place is about
        self.token_ids = torch.zeros((PLACES, k), dtype=torch.int32, device=device)
        self.probs = torch.zeros((PLACES, k), device=device)
        self._lock = Lock()

    def update(self, pairs: Sequence[tuple[int, int]], logits: torch.Tensor) -> None:
        """
        Args:
            pairs (`list[tuple[int, int]]` of length `slots`): The last two tokens in each slot; `NOTHING` before a
                text's first.
            logits (`torch.FloatTensor` of shape `(slots, vocab_size)`): The target's, after them.
        """
        vocab_size = logits.shape[1]
        # the last slot that is about a place has it: the device would let any of them win
        latest: dict[int, tuple[int, int]] = {}
        for slot, (before, token) in enumerate(pairs):
            for key in (token, _pair(before, token, vocab_size)):
                latest[_place(key)] = (key, slot)
        changes = torch.tensor([(place, key, slot) for place, (key, slot) in latest.items()])
        places, keys, slots = changes.to(logits.device, non_blocking=True).unbind(1)
        values, successors = logits.topk(min(self.k, vocab_size), dim=-1)
        probs = (values - logits.logsumexp(dim=-1, keepdim=True)).exp()
        missing = (0, self.k - values.shape[1])
        with self._lock:
            self.keys[places] = keys
            self.token_ids[places] = pad(successors.int(), missing)[slots]
            self.probs[places] = pad(probs, missing)[slots]

    def successors(
        self, before: torch.Tensor, tokens: torch.Tensor, vocab_size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        `(token_ids, probs)`, each of shape `(tokens, k)`, after the pair where it was seen, else after the token; with
        probability 0 where neither was.
        """
        pairs = _pair(before, tokens, vocab_size)
        with self._lock:
            places = torch.where(self.keys[_place(pairs)] == pairs, _place(pairs), _place(tokens))
            is_known = (self.keys[places] == pairs) | (self.keys[places] == tokens)
            return self.token_ids[places].long(), self.probs[places] * is_known[:, None]


def _pair(before, token, vocab_size: int):
    """The key of two tokens (a single token is its own), as numbers or tensors."""
    return vocab_size * (2 + before) + token


def _place(key):
    return (key * 40503 + (key >> 16)) % PLACES  # near 2**16 divided by the golden ratio


@dataclass
class RecyclingDrafter(Drafter):
    """
    Follows the target's own likeliest successors of each token (token recycling,
    https://huggingface.co/papers/2408.08696), of the last two tokens where that pair was seen. Every verified node
    teaches, the rejected ones too.

    Args:
        top_k (`int`, *optional*, defaults to 8): Successors that are remembered.
        trust (`float`, *optional*, defaults to 0.6):
            How likely a successor is accepted that the target had thought certain.
    """

    name: ClassVar[str] = "recycling"
    wants_logits = True
    top_k: int = 8
    trust: float = 0.6

    def start(self, context: DraftContext) -> None:
        self._sequences = context.sequences
        self._vocab_size = context.vocab_size
        device, earlier = context.input_ids.device, context.draft_history
        self._tables = [
            SuccessorTable(self.top_k, device) if earlier is None else earlier.successors(row, self.top_k, device)
            for row in range(context.sequences.batch_size)
        ]

    def propose_rows(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        """All rows' trees are grown on the device, and read at once."""
        grown = [self._grow(request) for request in requests]
        values = to_host(torch.cat([level for levels in grown for level in levels], dim=1))
        trees, start = [], 0
        for levels in grown:
            sizes = [level.shape[1] for level in levels]
            trees.append(_tree_of([row[start : start + sum(sizes)] for row in values], sizes, self.name))
            start += sum(sizes)
        return trees

    def _grow(self, request: DraftRequest) -> list[torch.Tensor]:
        """
        The likeliest paths, level by level: `(3, paths)` each, with the path of the level above that each of them goes
        on, its token, and the chance that it is accepted then.
        """
        table = self._tables[request.row]
        device = table.token_ids.device
        last = torch.tensor([NOTHING, *request.token_ids[-2:]][-2:]).to(device, non_blocking=True)
        before, tokens, chances = last[:1], last[1:], torch.ones(1, device=device)
        levels = []
        width = min(request.width, table.k)
        for _ in range(min(DEPTH, request.max_depth, request.max_nodes)):
            found, probs = table.successors(before, tokens, self._vocab_size)
            found, probs = found[:, :width], self.trust * probs[:, :width]
            reached, best = (chances[:, None] * probs).flatten().topk(min(request.max_nodes, probs.numel()))
            parents = best // width
            before, tokens, chances = tokens[parents], found.flatten()[best], reached
            levels.append(torch.stack([parents.float(), tokens.float(), probs.flatten()[best]]))
        return levels

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        for outcome in outcomes:
            text = self._sequences.tokens[outcome.row]
            end = len(text) - len(outcome.token_ids)
            if not end:
                continue  # prompted with embeddings: nothing is known of what the first token follows
            tokens = [text[end - 1], *outcome.tree.token_ids]
            before = [text[end - 2] if end > 1 else NOTHING, *(tokens[1 + parent] for parent in outcome.tree.parents)]
            assert outcome.logits is not None
            self._tables[outcome.row].update(list(zip(before, tokens, strict=True)), outcome.logits)


def _tree_of(values: list[list[float]], sizes: list[int], source: str) -> TokenTree:
    """The tree of all levels; ids below 2**24 are exact as floats."""
    tree = TokenTree()
    above: list[int | None] = [-1]
    start = 0
    for size in sizes:
        nodes: list[int | None] = []
        for parent, token, prob in zip(*(row[start : start + size] for row in values), strict=True):
            node_above = above[int(parent)]
            if node_above is None or prob <= 0:
                nodes.append(None)
            else:
                nodes.append(tree.add(int(token), node_above, source, confidence=prob))
        above, start = nodes, start + size
    return tree
