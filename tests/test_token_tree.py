"""Token trees against slow references."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specstate.drafting.mixture import mix
from hf_specstate.drafting.prior import values
from hf_specstate.token_tree import TokenTree, TreeBatch

often = settings(max_examples=150, deadline=None, derandomize=True)
TOKENS = st.integers(0, 3)
PATHS = st.lists(st.lists(TOKENS, max_size=5), max_size=5)


@st.composite
def trees(draw, max_nodes: int = 10) -> TokenTree:
    """Any tree whose siblings differ, in any order that puts parents first."""
    tree = TokenTree()
    for _ in range(draw(st.integers(0, max_nodes))):
        parent, token = draw(st.integers(-1, len(tree) - 1)), draw(TOKENS)
        if (parent, token) not in zip(tree.parents, tree.token_ids, strict=True):
            tree.add(token, parent, f"source {len(tree)}", log_prob=-float(len(tree)))
    tree.draft_probs = torch.arange(len(tree), dtype=torch.float32)[:, None].expand(-1, 4)
    return tree


@st.composite
def sure_trees(draw) -> TokenTree:
    tree = draw(trees())
    tree.draft_probs = None
    tree.confidences = [draw(st.floats(0, 1)) for _ in range(len(tree))]
    return tree


def paths_of(tree: TokenTree) -> list[tuple[int, ...]]:
    """The tokens from the root to each node."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.token_ids, tree.parents, strict=True):
        assert -1 <= parent < len(paths), "a parent must come before its children"
        paths.append((paths[parent] if parent >= 0 else ()) + (token,))
    return paths


def prefixes(paths) -> set[tuple[int, ...]]:
    return {tuple(path[:length]) for path in paths for length in range(1, len(path) + 1)}


@often
@given(PATHS)
def test_from_paths_holds_every_path_once(paths):
    found = paths_of(TokenTree.from_paths(paths, "here"))
    assert set(found) == prefixes(paths)
    assert len(found) == len(set(found))


@often
@given(PATHS, st.integers(0, 8))
def test_from_paths_serves_the_first_path_first(paths, max_nodes):
    found = paths_of(TokenTree.from_paths(paths, "here", max_nodes))
    assert len(found) == min(max_nodes, len(prefixes(paths)))
    assert set(found) <= prefixes(paths)
    if paths:
        assert prefixes([paths[0][:max_nodes]]) <= set(found)


@often
@given(trees())
def test_navigation(tree):
    paths = paths_of(tree)
    for node, path in enumerate(paths):
        assert tree.child(tree.parents[node], tree.token_ids[node]) == node
        assert tuple(tree.token_ids[above] for above in tree.path_to(node)) == path
        assert tree.depths[node] == len(path)
        children = {other[-1] for other in paths if other[:-1] == path}
        assert all((tree.child(node, token) is None) == (token not in children) for token in range(4))
    assert tree.path_to(-1) == []
    assert tree.is_chain == all(parent == node - 1 for node, parent in enumerate(tree.parents))


@often
@given(trees(), st.integers(0, 10), st.integers(0, 5))
def test_cut_keeps_the_first_nodes_within_its_limits(tree, max_nodes, max_depth):
    wanted = [node for node, path in enumerate(paths_of(tree)) if len(path) <= max_depth][:max_nodes]
    piece = tree.cut(max_nodes, max_depth)
    assert paths_of(piece) == [paths_of(tree)[node] for node in wanted]
    assert piece.sources == [tree.sources[node] for node in wanted]
    assert piece.log_probs == [tree.log_probs[node] for node in wanted]
    assert piece.draft_probs[:, 0].tolist() == wanted


@often
@given(st.lists(sure_trees(), min_size=1, max_size=3), st.integers(0, 20), st.integers(0, 4))
def test_a_mixture_is_the_likeliest_part_of_the_union(proposals, max_nodes, max_depth):
    before = [paths_of(tree) for tree in proposals]
    mixed = mix(proposals, max_nodes, max_depth, None)
    found, everything = paths_of(mixed), mix(proposals, 1000, 1000, None)
    assert [paths_of(tree) for tree in proposals] == before, "the proposals are left alone"
    assert len(found) == len(set(found)), "no node twice"
    assert set(paths_of(everything)) == {path for paths in before for path in paths}
    worth = dict(zip(paths_of(everything), values(everything), strict=True))
    within = {path: value for path, value in worth.items() if len(path) <= max_depth}
    assert len(found) == min(max_nodes, len(within))
    rest = [value for path, value in within.items() if path not in found]
    assert not found or not rest or min(worth[path] for path in found) >= max(rest) - 1e-12
    for path, source in zip(found, mixed.sources, strict=True):
        who = {
            name
            for tree, paths in zip(proposals, before, strict=True)
            if path in paths
            for name in tree.sources[paths.index(path)].split("+")
        }
        assert set(source.split("+")) == who


@often
@given(st.lists(sure_trees(), min_size=1, max_size=3), st.integers(1, 3))
def test_a_mixture_keeps_to_its_width(proposals, width):
    mixed = mix(proposals, 1000, 1000, width)
    assert all(mixed.parents.count(parent) <= width for parent in range(-1, len(mixed)))
    assert width > 1 or mixed.is_chain


@often
@given(st.lists(trees(), min_size=1, max_size=4), st.integers(0, 3), st.booleans())
def test_packing(rows, spare, together):
    width = 1 + max(map(len, rows)) + spare
    roots = list(range(10, 10 + len(rows)))
    batch = TreeBatch.pack(roots, rows, pad_token_id=99, width=width, together=together)
    seen = batch.ancestors()
    assert seen.shape == (len(rows), width, width)
    deepest = [max(tree.depths, default=0) for tree in rows]
    for row, tree in enumerate(rows):
        used = 1 + len(tree)
        assert batch.token_ids[row] == [roots[row], *tree.token_ids, *[99] * (width - used)]
        assert batch.depths[row][:used] == [0, *tree.depths]
        for slot in range(width):
            line, above = set(), slot
            while above >= 0:
                line.add(above)
                above = batch.parents[row][above]
            assert set(seen[row, slot].nonzero().flatten().tolist()) == line
            if slot < used:
                assert line == {0, *(1 + node for node in tree.path_to(slot - 1))}, (
                    "a node sees its own path, never padding"
                )
            else:
                assert line == (set(range(slot + 1)) if tree.is_chain else {0, slot}), (
                    "padding hangs on a chain or root"
                )
                limit = max(deepest) if together else deepest[row]
                assert batch.depths[row][slot] == min(len(line) - 1, limit), "padding stays within known positions"


@often
@given(st.lists(st.lists(TOKENS, max_size=5), min_size=1, max_size=4), st.integers(0, 3))
def test_chains_are_padded_to_chains(chains, spare):
    rows = [TokenTree.from_paths([chain], "here") for chain in chains]
    assert TreeBatch.pack([0] * len(rows), rows, 99, 1 + max(map(len, rows)) + spare).is_chain


def test_a_branching_row_makes_no_chain():
    assert not TreeBatch.pack(
        [0, 0], [TokenTree.from_paths([[1, 2]], ""), TokenTree.from_paths([[1], [2]], "")], 9, 3
    ).is_chain


@pytest.mark.parametrize("parent", [-2, 0, 1])
def test_a_parent_must_come_first(parent):
    with pytest.raises(ValueError, match=f"parent {parent} of node 0"):
        TokenTree().add(1, parent, "here")
