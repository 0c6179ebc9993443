"""Drafting from what the target thought likely after a token the last time that it saw one."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from threading import Lock
from typing import ClassVar

import torch
from torch.nn.functional import pad

from ..host import from_host, to_host
from ..token_tree import TokenTree
from .base import DraftContext, Drafter, DraftOutcome, DraftRequest

DEPTH = 6  # of trees
PLACES, FEWEST_PLACES = 2**16, 2**12
NOTHING = -1
Seen = tuple[int, Sequence[tuple[int, int]], torch.Tensor]  # see [`SuccessorTable.update`]


class SuccessorTable:
    """
    For tokens and for pairs of tokens, the target's `k` likeliest next tokens when it last came by, with their
    probabilities. Lies on the target's device and has 65,536 places of `8 + 8 * k` bytes for each text, whatever the
    vocabulary (4.5 MiB with `k = 8`); from five texts on, at most as many as four have together, but at least 4,096 for
    each. What falls into the place of something else replaces it. Threads may share it.

    Args:
        k (`int`): Successors of each.
        device (`torch.device`): Of the target's logits.
        num_texts (`int`, *optional*, defaults to 1): That learn apart from each other.
    """

    def __init__(self, k: int, device: torch.device, num_texts: int = 1):
        self.k = k
        # of each text: a power of two, that no factor of it is one of the keys' too
        self.places = max(PLACES >> max((num_texts - 1).bit_length() - 2, 0), FEWEST_PLACES)
        size = num_texts * self.places
        self.keys = torch.full((size,), NOTHING, dtype=torch.long, device=device)  # what each place is about
        self.token_ids = torch.zeros((size, k), dtype=torch.int32, device=device)
        self.probs = torch.zeros((size, k), dtype=torch.float32, device=device)
        self._lock = Lock()

    def update(self, seen: Sequence[Seen]) -> None:
        """
        Args:
            seen (`list[tuple]`): For some texts, `(text, pairs, logits)`: which it is; the last two tokens in each of
                `slots`, `NOTHING` before a text's first; and the target's logits after them, of shape `(slots,
                vocab_size)`.
        """
        # the last slot that is about a place has it: the device would let any of them win
        latest: dict[int, tuple[int, int]] = {}
        slot = 0
        for text, pairs, logits in seen:
            for before, token in pairs:
                for key in (token, _pair(before, token, logits.shape[1])):
                    latest[self._place(text, key)] = (key, slot)
                slot += 1
        changes = [(place, key, slot) for place, (key, slot) in latest.items()]
        places, keys, slots = from_host(changes, self.keys.device).unbind(1)
        best = [logits.softmax(dim=-1).topk(min(self.k, logits.shape[1]), dim=-1) for _, _, logits in seen]
        probs = torch.cat([values for values, _ in best]).float()
        successors = torch.cat([tokens for _, tokens in best])
        missing = (0, self.k - probs.shape[1])
        with self._lock:
            self.keys[places] = keys
            self.token_ids[places] = pad(successors.int(), missing)[slots]
            self.probs[places] = pad(probs, missing)[slots]

    def successors(
        self, texts: torch.Tensor, before: torch.Tensor, tokens: torch.Tensor, vocab_size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        `(token_ids, probs)`, each of shape `(*tokens.shape, k)`, after the pair where its text has seen it, else after
        the token; with probability 0 where neither was seen.
        """
        pairs = _pair(before, tokens, vocab_size)
        of_pairs, of_tokens = self._place(texts, pairs), self._place(texts, tokens)
        with self._lock:
            places = torch.where(self.keys[of_pairs] == pairs, of_pairs, of_tokens)
            is_known = (self.keys[places] == pairs) | (self.keys[places] == tokens)
            return self.token_ids[places].long(), self.probs[places] * is_known[..., None]

    def _place(self, text, key):
        """Where a text's key stands, as numbers or tensors; the factor is near 2**16 divided by the golden ratio."""
        return text * self.places + (key * 40503 + (key >> 16)) % self.places


def _pair(before, token, vocab_size: int):
    """The key of two tokens (a single token is its own), as numbers or tensors."""
    return vocab_size * (2 + before) + token


@dataclass
class RecyclingDrafter(Drafter):
    """
    Follows the target's own likeliest successors of each token (token recycling,
    https://huggingface.co/papers/2408.08696), of the last two tokens where that pair was seen. Every verified node
    teaches, the rejected ones too; but not in rounds in which the schedule could not afford to ask.

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
        device, earlier, rows = context.input_ids.device, context.draft_history, range(context.sequences.batch_size)
        self._learning = set(rows)  # rows to whose text it listens: those that it was asked for, and a first time
        # under "rejection", where drafters before it may have spoken, it listens to all
        self._learns_always = context.config.acceptance == "rejection"
        # of each row, its table and which of the table's texts it is
        if earlier is None:
            table = SuccessorTable(self.top_k, device, len(rows))
            self._texts = [(table, row) for row in rows]
        else:
            self._texts = [(earlier.successors(row, self.top_k, device), 0) for row in rows]

    def propose_rows(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        """All rows' trees are grown on the device, level by level, and read at once."""
        width = min(max(request.width for request in requests), self.top_k)
        max_nodes = max(request.max_nodes for request in requests)
        sizes = [1]  # paths in each level
        for _ in range(min(DEPTH, max_nodes, max(request.max_depth for request in requests))):
            sizes.append(min(max_nodes, sizes[-1] * width))
        self._learning = {request.row for request in requests}
        by_table = self._by_table([request.row for request in requests])
        grown = [self._grow(table, [requests[place] for place in places], sizes, width) for table, places in by_table]
        trees = [_tree_of(paths, sizes, self.name) for paths in to_host(torch.cat(grown))]
        order = [place for _, places in by_table for place in places]
        return [tree for _, tree in sorted(zip(order, trees, strict=True), key=itemgetter(0))]

    def _by_table(self, rows: Sequence[int]) -> list[tuple[SuccessorTable, list[int]]]:
        """Tables, each with where those of `rows` stand that share it."""
        found: dict[int, tuple[SuccessorTable, list[int]]] = {}
        for place, row in enumerate(rows):
            table, _ = self._texts[row]
            found.setdefault(id(table), (table, []))[1].append(place)
        return list(found.values())

    def _grow(
        self, table: SuccessorTable, requests: Sequence[DraftRequest], sizes: list[int], width: int
    ) -> torch.Tensor:
        """
        The likeliest paths, in levels of `sizes`, the root being the first: `(rows, paths, 3)`, with the path of the
        level above that each of them goes on, its token, and the chance that it is accepted then.
        """
        device = table.token_ids.device
        last = [[self._texts[request.row][1], NOTHING, *request.token_ids[-2:]] for request in requests]
        texts, before, tokens = from_host([[row[0], *row[-2:]] for row in last], device).split(1, dim=1)
        chances = torch.ones(tokens.shape, dtype=torch.float32, device=device)
        levels = []
        for size in sizes[1:]:
            found, probs = table.successors(texts, before, tokens, self._vocab_size)
            found, probs = found[..., :width].flatten(1), self.trust * probs[..., :width]
            chances, best = (chances[..., None] * probs).flatten(1).topk(size)
            parents = best // width
            before, tokens = tokens.gather(1, parents), found.gather(1, best)
            levels.append(torch.stack([parents.float(), tokens.float(), probs.flatten(1).gather(1, best)], dim=-1))
        return torch.cat(levels, dim=1)

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        seen: dict[int, Seen] = {}
        for outcome in outcomes:
            text = self._sequences.tokens[outcome.row]
            end = len(text) - len(outcome.token_ids)
            if not end:  # prompted with embeddings: nothing is known of what the first token follows
                continue
            if not self._learns_always and outcome.row not in self._learning:
                continue
            tokens = [text[end - 1], *outcome.tree.token_ids]
            before = [text[end - 2] if end > 1 else NOTHING, *(tokens[1 + parent] for parent in outcome.tree.parents)]
            assert outcome.logits is not None
            seen[outcome.row] = self._texts[outcome.row][1], list(zip(before, tokens, strict=True)), outcome.logits
        self._learning.clear()
        rows = list(seen)
        for table, places in self._by_table(rows):
            table.update([seen[rows[place]] for place in places])


def _tree_of(paths: list[list[float]], sizes: list[int], source: str) -> TokenTree:
    """The tree of all levels; ids below 2**24 are exact as floats."""
    tree = TokenTree()
    above: list[int | None] = [-1]
    start = 0
    for size in sizes[1:]:
        nodes: list[int | None] = []
        for parent, token, prob in paths[start : start + size]:
            node_above = above[int(parent)]
            if node_above is None or prob <= 0:
                nodes.append(None)
            else:
                nodes.append(tree.add(int(token), node_above, source, confidence=prob))
        above, start = nodes, start + size
    return tree
