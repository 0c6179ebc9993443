"""Several drafters' proposals for a row as one tree."""

from collections.abc import Sequence

from ..token_tree import TokenTree, names_of
from .prior import acceptance, values

AGREEMENT = 0.5  # of the doubt that is left when another source names the same token


def mix(proposals: Sequence[TokenTree], max_nodes: int, max_depth: int, max_width: int | None) -> TokenTree:
    """
    The nodes of several trees that are most likely accepted.

    Args:
        proposals (`list[TokenTree]`): One of each drafter.
        max_nodes (`int`), max_depth (`int`), max_width (`int`, *optional*):
            Most nodes, the greatest depth, and most children of a node.
    """
    return likeliest(merge(proposals), max_nodes, max_depth, max_width)


def likeliest(tree: TokenTree, max_nodes: int, max_depth: int | None = None, max_width: int | None = None) -> TokenTree:
    """The nodes of `tree` that the walk takes most likely, by their confidences."""
    worth = values(tree)
    order = sorted(range(len(tree)), key=lambda node: -worth[node])  # stable: parents come first
    return tree.best(order, max_nodes, len(tree) if max_depth is None else max_depth, max_width)


def merge(proposals: Sequence[TokenTree]) -> TokenTree:
    """
    One tree of several. A node that several propose is one node that names them all, and is as likely as if they were
    independent witnesses of equal worth: the surest of them counts, and each other one takes away a part of the
    remaining doubt.
    """
    if len(proposals) == 1:
        return proposals[0]
    merged = TokenTree()
    children: dict[tuple[int, int], int] = {}
    for proposal in proposals:
        place = {-1: -1}
        for node, token in enumerate(proposal.token_ids):
            parent = place[proposal.parents[node]]
            known = children.get((parent, token))
            if known is None:
                known = merged.add(
                    token, parent, proposal.sources[node], proposal.log_probs[node], acceptance(proposal, node)
                )
                children[parent, token] = known
            else:
                _agree(merged, known, proposal, node)
            place[node] = known
    return merged


def _agree(merged: TokenTree, known: int, proposal: TokenTree, node: int) -> None:
    names = names_of(merged.sources[known])
    new = [name for name in names_of(proposal.sources[node]) if name and name not in names]
    if not new:
        return
    merged.sources[known] = "+".join(names + new)
    ours, theirs = merged.confidences[known], acceptance(proposal, node)
    best, other = max(ours, theirs), min(ours, theirs)
    merged.confidences[known] = 1 - (1 - best) * (1 - AGREEMENT * other)
