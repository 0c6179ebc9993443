"""Token trees: what a drafter proposes for one row, and how the rows' trees are packed into one forward."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from .host import from_host


def names_of(source: str) -> list[str]:
    """Who proposed a node: `"history+recycling"` is two."""
    return source.split("+")


def depths_of(parents: Sequence[int]) -> list[int]:
    """Distance of each node of a tree from its root, 1 for the root's children, whose parent is -1."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


@dataclass
class TokenTree:
    """
    Candidate continuations of one row. Node `i` follows node `parents[i]`, or the row's last committed token (the
    *root*) if `parents[i]` is -1. Parents come before their children. A chain is a tree.

    Args:
        token_ids (`list[int]` of length `nodes`): The drafted tokens.
        parents (`list[int]` of length `nodes`): Index of each node's parent, -1 for the root.
        log_probs (`list[float]` of length `nodes`):
            Natural log of the drafter's probability of the node given its parent; NaN where it has none.
        sources (`list[str]` of length `nodes`):
            Who proposed each node: the name of a drafter, or of one of its methods; several joined by `+`.
        confidences (`list[float]` of length `nodes`):
            How likely, says the drafter, each node is accepted if its parent is; NaN where it says nothing.
        draft_probs (`torch.Tensor` of shape `(nodes, vocab_size)`, *optional*):
            The full distributions that the nodes were drawn from, for `"rejection"` acceptance. Absent for nodes that
            were chosen rather than drawn.
    """

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    draft_probs: torch.Tensor | None = None

    def __post_init__(self):
        self.confidences = self.confidences or [math.nan] * len(self.token_ids)

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]], source: str, max_nodes: int | None = None) -> "TokenTree":
        """The tree of several continuations, first path first, with at most `max_nodes` nodes."""
        tree = cls()
        children: dict[tuple[int, int], int] = {}
        for path in paths:
            parent = -1
            for token in path:
                known = children.get((parent, token))
                if known is None:
                    if max_nodes is not None and len(tree) >= max_nodes:
                        break
                    known = children[parent, token] = tree.add(token, parent, source)
                parent = known
        return tree

    def add(
        self, token: int, parent: int, source: str, log_prob: float = math.nan, confidence: float = math.nan
    ) -> int:
        """Appends a node and returns its index."""
        if not -1 <= parent < len(self.token_ids):
            raise ValueError(f"A node's parent must come before it: parent {parent} of node {len(self.token_ids)}.")
        self.token_ids.append(int(token))
        self.parents.append(parent)
        self.log_probs.append(log_prob)
        self.sources.append(source)
        self.confidences.append(confidence)
        return len(self.token_ids) - 1

    def check(self, vocab_size: int) -> None:
        """
        Raises:
            ValueError: this is not a tree of tokens below `vocab_size`, by whatever hand it was made.
        """
        lists = (self.parents, self.log_probs, self.sources, self.confidences)
        if any(len(values) != len(self.token_ids) for values in lists):
            raise ValueError("a tree's lists must be equally long")
        for node, (token, parent) in enumerate(zip(self.token_ids, self.parents, strict=True)):
            if not isinstance(token, int) or not 0 <= token < vocab_size:
                raise ValueError(f"node {node} is no token of a vocabulary of {vocab_size}: {token!r}")
            if not isinstance(parent, int) or not -1 <= parent < node:
                raise ValueError(f"the parent of node {node} must come before it, got {parent!r}")

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def depths(self) -> list[int]:
        """Distance of each node from the root, 1 for the root's children."""
        return depths_of(self.parents)

    @property
    def is_chain(self) -> bool:
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    def child(self, parent: int, token: int) -> int | None:
        """The node for `token` after `parent` (-1: the root), if it was drafted."""
        for node in range(parent + 1, len(self.token_ids)):
            if self.parents[node] == parent and self.token_ids[node] == token:
                return node
        return None

    def path_to(self, node: int) -> list[int]:
        """The nodes from the root's child down to `node`."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def cut(self, max_nodes: int, max_depth: int, max_width: int | None = None) -> "TokenTree":
        """The first `max_nodes` nodes no deeper than `max_depth`, of each node the first `max_width` children."""
        return self.best(range(len(self)), max_nodes, max_depth, max_width)

    def best(self, order: Iterable[int], max_nodes: int, max_depth: int, max_width: int | None = None) -> "TokenTree":
        """
        The first nodes that `order` names and that fit, in their old order; a node without its parent does not fit.

        Args:
            order (`Iterable[int]`): Nodes, each after its parent.
            max_nodes (`int`), max_depth (`int`), max_width (`int`, *optional*):
                Most nodes, the greatest depth, and most children of a node.
        """
        depths, keep = self.depths, {-1}
        children: Counter[int] = Counter()
        for node in order:
            if len(keep) > max_nodes:
                break
            parent = self.parents[node]
            fits = depths[node] <= max_depth and (max_width is None or children[parent] < max_width)
            if fits and parent in keep:
                keep.add(node)
                children[parent] += 1
        if len(keep) == 1 + len(self):
            return self
        kept = sorted(keep)[1:]
        new_index = {node: index for index, node in enumerate(kept)} | {-1: -1}
        return TokenTree(
            [self.token_ids[node] for node in kept],
            [new_index[self.parents[node]] for node in kept],
            [self.log_probs[node] for node in kept],
            [self.sources[node] for node in kept],
            [self.confidences[node] for node in kept],
            None if self.draft_probs is None else self.draft_probs[kept],
        )


IDLE_DEPTH = -1  # where the row's last cached token stands: a place that its model surely knows


@dataclass
class TreeBatch:
    """
    The rows' trees behind their root tokens, padded to one width: the input of one forward. Slot 0 of a row is its
    root, slot `1 + i` its node `i`. Padding continues a row that is a chain, and hangs on the root of another; no node
    follows it and nobody looks it up.

    Args:
        token_ids (`list[list[int]]` of shape `(batch_size, width)`): Tokens of the slots.
        parents (`list[list[int]]` of shape `(batch_size, width)`): Slot of each slot's parent, -1 for the root.
        depths (`list[list[int]]` of shape `(batch_size, width)`):
            Distance from the root, 0 for the root; -1 throughout in a row that only runs along.
    """

    token_ids: list[list[int]]
    parents: list[list[int]]
    depths: list[list[int]]

    @classmethod
    def pack(
        cls,
        roots: Sequence[int | None],
        trees: Sequence[TokenTree],
        pad_token_id: int,
        width: int,
        together: bool = False,
    ) -> "TreeBatch":
        """
        Args:
            roots (`list[int | None]`): The last committed token of each row, None for a row that only runs along.
            trees (`list[TokenTree]`): What was drafted after it.
            pad_token_id (`int`): Fills the rows.
            width (`int`): Slots a row; at least one more than the largest tree has nodes.
            together (`bool`, *optional*, defaults to `False`):
                Rows are equally long, so padding may reach as deep as any draft. Otherwise it stays within its own
                row's draft: further on, a row may have come to the last position that its model knows.
        """
        batch = cls([], [], [])
        deepest = [max(tree.depths, default=0) for tree in trees]
        for root, tree, own_depth in zip(roots, trees, deepest, strict=True):
            limit = max(deepest) if together else own_depth
            padding = width - 1 - len(tree)
            parents = [-1] + [parent + 1 for parent in tree.parents]
            parents += list(range(len(parents) - 1, width - 1)) if tree.is_chain else [0] * padding
            depths = [0]
            for parent in parents[1:]:
                depths.append(min(depths[parent] + 1, limit))
            batch.token_ids.append([pad_token_id if root is None else root, *tree.token_ids, *[pad_token_id] * padding])
            batch.parents.append(parents)
            batch.depths.append([IDLE_DEPTH] * width if root is None else depths)
        return batch

    @property
    def width(self) -> int:
        return len(self.token_ids[0])

    @property
    def is_chain(self) -> bool:
        return all(parent == slot - 1 for parents in self.parents for slot, parent in enumerate(parents))

    def ancestors(self) -> torch.Tensor:
        """`torch.BoolTensor` of shape `(batch_size, width, width)`: does slot `i` see slot `j` (itself included)?"""
        rows, parents = torch.arange(len(self.parents), device="cpu"), from_host(self.parents)
        seen = torch.eye(self.width, dtype=torch.bool, device="cpu").repeat(len(self.parents), 1, 1)
        for slot in range(1, self.width):  # all rows at once; slot 0 is the root
            seen[:, slot] |= seen[rows, parents[:, slot]]
        return seen
