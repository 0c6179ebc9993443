"""How a drafting model's tree grows, node by node."""

import math

import torch

from ..token_tree import TokenTree
from .base import DraftRequest
from .prior import acceptance

SURE = 0.6  # of a chain that others proposed: the chance that all of it is accepted, from which it is not drafted anew


class Growth:
    """
    How far one row's tree has grown, and which node gets children next.

    Args:
        request ([`DraftRequest`]): What is wanted.
        max_depth (`int`): That its model can reach.
        threshold (`float`, *optional*): Nothing is drafted after a token to which the model gave less.
        in_trees (`bool`): The model can run trees.
    """

    def __init__(self, request: DraftRequest, max_depth: int, threshold: float | None, in_trees: bool):
        self.max_nodes = request.max_nodes
        self.max_depth = max_depth
        self.width = request.width if in_trees else 1
        self.threshold = threshold
        self.known = sure_path(request.known, min(max_depth, request.max_nodes) - 1)
        # runs of the assistant, the catching up included
        self.steps = math.ceil((request.max_nodes - len(self.known)) / self.width)
        self.node = -1  # the root
        self.distributions: list[torch.Tensor] = []
        self._frontier: list[tuple[float, int]] = []  # (-log probability of the whole path, node)

    def offer(self, node: int, tree: TokenTree) -> None:
        """A new node may be run later."""
        self._frontier.append((-sum(tree.log_probs[ancestor] for ancestor in tree.path_to(node)), node))

    def choose(self, tree: TokenTree) -> bool:
        """Moves to the most likely node without children; False if the row has drafted enough."""
        self.steps -= 1
        self._frontier = [entry for entry in self._frontier if len(tree.path_to(entry[1])) < self.max_depth]
        if self.steps <= 0 or len(tree) >= self.max_nodes or not self._frontier:
            return False
        best = min(self._frontier)
        self._frontier.remove(best)
        self.node = best[1]
        # only what came before a token may decide whether it is drafted, so an unsure token itself is still offered
        return self.threshold is None or math.exp(tree.log_probs[self.node]) >= self.threshold


def sure_path(known: TokenTree, max_length: int) -> list[tuple[int, float]]:
    """`(token, chance given the one before)` along the likeliest chain of `known`, as far as it is `SURE`."""
    path: list[tuple[int, float]] = []
    node, value = -1, 1.0
    while len(path) < max_length:
        children = [child for child, parent in enumerate(known.parents) if parent == node]
        if not children:
            break
        node = max(children, key=lambda child: acceptance(known, child))
        value *= acceptance(known, node)
        if value < SURE:
            break
        path.append((known.token_ids[node], acceptance(known, node)))
    return path
