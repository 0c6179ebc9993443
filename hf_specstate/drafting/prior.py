"""How likely a drafted node is accepted, before anything was measured."""

import math

from ..token_tree import TokenTree

# of drafters that say nothing about a node
UNKNOWN = 0.4
# an assistant's own probability of its token says too much: it is most likely right where it is sure, and less often
# right than it believes where it is not
ASSISTANT_TRUST = 0.9


def acceptance(tree: TokenTree, node: int) -> float:
    """The chance that `node` is accepted if its parent is: what its drafter says, or its probability, or a guess."""
    confidence = tree.confidences[node]
    if math.isnan(confidence):
        log_prob = tree.log_probs[node]
        confidence = UNKNOWN if math.isnan(log_prob) else ASSISTANT_TRUST * math.exp(log_prob)
    return min(max(confidence, 0.0), 1.0)


def values(tree: TokenTree) -> list[float]:
    """The chance that the walk takes each node: the product of acceptances on its path."""
    known: list[float] = []
    for node, parent in enumerate(tree.parents):
        known.append(acceptance(tree, node) * (1.0 if parent < 0 else known[parent]))
    return known
