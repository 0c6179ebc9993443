"""Drafting from what the target thought likely after a token the last time that it saw one."""

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import ClassVar

import torch

from ..host import to_host
from ..token_tree import TokenTree
from .base import DraftContext, Drafter, DraftOutcome, DraftRequest

DEPTH = 6  # of trees
PAIR_SLOTS = 2**16
UNSEEN = -1


class SuccessorTable:
    """
    For every token, and for many pairs of tokens, the target's `k` likeliest next tokens when it last came by, with
    their probabilities. Lies on the target's device. Memory: `(vocab_size + 65,536) * k * 8` bytes, and 512 KiB for the
    pairs; a pair that falls into the place of another one replaces it. Threads may share it.

    Args:
        vocab_size (`int`): Of the target.
        k (`int`): Successors of each.
        device (`torch.device`): Of the target's logits.
    """

    def __init__(self, vocab_size: int, k: int, device: torch.device):
        self.vocab_size, self.k = vocab_size, min(k, vocab_size)
        rows = vocab_size + PAIR_SLOTS  # tokens first, pairs behind them
        self.token_ids = torch.full((rows, self.k), UNSEEN, dtype=torch.int32, device=device)
        self.probs = torch.zeros((rows, self.k), device=device)
        self.pairs = torch.full((PAIR_SLOTS,), UNSEEN, dtype=torch.long, device=device)  # which pair a place holds
        self._lock = Lock()

    def update(self, before: torch.Tensor, tokens: torch.Tensor, logits: torch.Tensor) -> None:
        """
        Args:
            before, tokens (`torch.LongTensor` of shape `(slots,)`): The last two tokens in each slot; UNSEEN before a
                text's first.
            logits (`torch.FloatTensor` of shape `(slots, vocab_size)`): The target's, after them.
        """
        values, successors = logits.topk(self.k, dim=-1)
        probs = (values - logits.logsumexp(dim=-1, keepdim=True)).exp()
        pairs, places = self._places(before, tokens)
        with self._lock:
            self.pairs[places] = pairs
            for rows in (tokens, self.vocab_size + places):
                self.token_ids[rows] = successors.int()
                self.probs[rows] = probs

    def successors(self, before: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """
        `(token_ids, probs)`, each of shape `(tokens, k)`, after the pair where it was seen, else after the token;
        UNSEEN and 0 where neither was.
        """
        pairs, places = self._places(before, tokens)
        with self._lock:
            rows = torch.where(self.pairs[places] == pairs, self.vocab_size + places, tokens)
            return self.token_ids[rows], self.probs[rows]

    def _places(self, before: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pairs = before * self.vocab_size + tokens
        return pairs, (before * 0x9E3779B1 + tokens) % PAIR_SLOTS


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
    wants_logits: ClassVar[bool] = True
    top_k: int = 8
    trust: float = 0.6

    def start(self, context: DraftContext) -> None:
        self._sequences = context.sequences
        device = context.input_ids.device
        earlier = context.draft_history
        self._tables = [
            SuccessorTable(context.vocab_size, self.top_k, device)
            if earlier is None
            else earlier.successors(row, context.vocab_size, self.top_k, device)
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
        last = torch.tensor([UNSEEN, *request.token_ids][-2:], device=device)
        before, tokens, chances = last[:1], last[1:], torch.ones(1, device=device)
        levels = []
        width = min(request.width, table.k)
        for _ in range(min(DEPTH, request.max_depth, request.max_nodes)):
            found, probs = table.successors(before, tokens)
            found, probs = found[:, :width].long(), self.trust * probs[:, :width]
            reached, best = (chances[:, None] * probs).flatten().topk(min(request.max_nodes, probs.numel()))
            parents = best // width
            before, tokens, chances = tokens[parents], found.flatten()[best].clamp(min=0), reached
            levels.append(torch.stack([parents.float(), tokens.float(), probs.flatten()[best]]))
        return levels

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        for outcome in outcomes:
            tree = outcome.tree
            text = self._sequences.tokens[outcome.row]
            end = len(text) - len(outcome.token_ids)
            tokens = [text[end - 1], *tree.token_ids]
            before = [text[end - 2] if end > 1 else UNSEEN, *(tokens[1 + parent] for parent in tree.parents)]
            logits = outcome.logits
            assert logits is not None
            slots = torch.tensor([before, tokens], device=logits.device)
            self._tables[outcome.row].update(slots[0], slots[1], logits)


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
