"""What the drafters without a model propose, and how their proposals become one tree."""

import math
from types import SimpleNamespace

import pytest
import torch
from families import prompt, tiny
from transformers import GenerationConfig, LogitsProcessorList

import hf_specstate
from hf_specstate import DRAFTERS, Drafter, SpecStateConfig, TokenTree
from hf_specstate.drafting import (
    DraftContext,
    DraftOutcome,
    DraftRequest,
    HistoryDrafter,
    PreviousDraftsDrafter,
    RecyclingDrafter,
)
from hf_specstate.drafting.mixture import mix
from hf_specstate.drafting.previous_drafts import rejected_branches, tails
from hf_specstate.drafting.prior import values
from hf_specstate.drafting.recycling import NOTHING, SuccessorTable
from hf_specstate.scheduling import Acceptance
from hf_specstate.sequences import Sequences

VOCAB = 50
MODEL_FREE = ["history", "previous_drafts", "recycling"]


def started(drafter: Drafter, *prompts: list[int]) -> tuple[Drafter, Sequences]:
    sequences = Sequences(torch.tensor(prompts), None, pad_token_id=0)
    text_config = SimpleNamespace(vocab_size=VOCAB)
    context = DraftContext(
        model=SimpleNamespace(config=SimpleNamespace(get_text_config=lambda decoder: text_config)),
        sequences=sequences,
        config=SpecStateConfig(),
        generation_config=GenerationConfig(max_length=1000),
        logits_processor=LogitsProcessorList(),
        input_ids=torch.tensor(prompts),
        model_kwargs={},
        acceptance=Acceptance(),
    )
    drafter.start(context)
    return drafter, sequences


def request(sequences: Sequences, row: int = 0, max_nodes: int = 6, max_depth: int = 6, width: int = 6) -> DraftRequest:
    return DraftRequest(row, sequences.tokens[row], max_nodes, max_depth, width)


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    """The paths from the root to each node, as tokens."""
    return {tuple(tree.token_ids[ancestor] for ancestor in tree.path_to(node)) for node in range(len(tree))}


# ---------------------------------------------------------------------- history


def test_history_weighs_continuations_by_match_and_count():
    text = [1, 2, 3, 9, 1, 2, 3, 9, 1, 2, 4, 9, 5, 2, 6, 9, 1, 2]
    drafter, sequences = started(HistoryDrafter(), text)
    tree = drafter.propose(request(sequences, max_depth=1))
    assert tree.token_ids == [3, 4, 6]  # twice after [.., 9, 1, 2]; once; once after [2] alone
    assert tree.confidences == sorted(tree.confidences, reverse=True) and sum(tree.confidences) <= 1
    longer = drafter.propose(request(sequences))
    assert (3, 9, 1, 2) in paths(longer) and values(longer) == sorted(values(longer), reverse=True)
    narrow = drafter.propose(request(sequences, width=1))
    assert narrow.is_chain and narrow.token_ids[:4] == [3, 9, 1, 2]


def test_history_goes_on_in_a_loop():
    drafter, sequences = started(HistoryDrafter(), [7, 8, 9, 5, 6, 5, 6, 5, 6])
    tree = drafter.propose(request(sequences, width=1, max_nodes=6))
    assert tree.token_ids == [5, 6, 5, 6, 5, 6]


def test_history_learns_what_is_written():
    drafter, sequences = started(HistoryDrafter(), [1, 2])
    assert len(drafter.propose(request(sequences))) == 0
    for token in (3, 4, 1, 2):
        sequences.commit(0, token)
    drafter.observe([DraftOutcome(0, TokenTree(), [], [3, 4, 1, 2])])
    assert drafter.propose(request(sequences, max_nodes=2)).token_ids == [3, 4]


def test_rows_share_only_if_allowed():
    for share in (False, True):
        drafter, sequences = started(HistoryDrafter(share_rows=share), [1, 2, 3, 4], [8, 9, 1, 2])
        assert drafter.propose(request(sequences, row=1, max_nodes=2)).token_ids == ([3, 4] if share else [])


# ---------------------------------------------------------------------- previous drafts

CHAIN = TokenTree.from_paths([[10, 11, 12, 13]], "any")
TREE = TokenTree.from_paths([[10, 11, 12], [20, 21, 22], [10, 15, 16]], "any")


def told(outcome: DraftOutcome) -> list[tuple[str, list[int]]]:
    return [(source, tail) for branch in rejected_branches(outcome) for source, _, tail in tails(outcome, branch)]


def test_tails_of_a_chain():
    outcome = DraftOutcome(0, CHAIN, [0], [10, 30], [10, 30, 31, 32, 33])
    assert told(outcome) == [
        ("answer_tail", [31, 32, 33]),
        ("draft_tail", [12, 13]),  # 11 was replaced by 30
        ("draft_tail", [11, 12, 13]),  # 30 was inserted
    ]
    left_out = DraftOutcome(0, CHAIN, [], [12], [12, 31, 32, 33, 34])
    assert ("draft_tail", [13]) in told(left_out)


def test_tails_of_every_branch_of_a_tree():
    answers = [40, 41, 42, 43, 44, 45, 46, 47, 48]  # after the root, 10, 11, 12, 20, 21, 22, 15, 16
    at_root = DraftOutcome(0, TREE, [], [40], answers)
    assert [tail for source, tail in told(at_root) if source == "answer_tail"] == [
        [41, 42, 43], [44, 45, 46], [41, 47, 48]
    ]  # fmt: skip
    in_branch = DraftOutcome(0, TREE, [0, 1], [10, 11, 42], answers)
    assert [tail for source, tail in told(in_branch) if source == "answer_tail"] == [[43]]


@pytest.mark.parametrize(
    "outcome",
    [
        DraftOutcome(0, CHAIN, [0, 1, 2, 3], [10, 11, 12, 13, 14], [10, 11, 12, 13, 14]),
        DraftOutcome(0, CHAIN, [0, 1], [10, 11], [10, 11, 12, 13, 14]),
        DraftOutcome(0, TokenTree(), [], [10], [10]),
    ],
    ids=["all accepted", "stopped inside", "no draft"],
)
def test_nothing_contradicted_leaves_no_tails(outcome):
    assert told(outcome) == []


def test_the_next_draft_comes_from_the_last_one_and_the_prompt():
    drafter, sequences = started(PreviousDraftsDrafter(), [33, 5, 6, 7])
    for token in (10, 30):
        sequences.commit(0, token)
    drafter.observe([DraftOutcome(0, CHAIN, [0], [10, 30], [10, 30, 31, 32, 33])])
    tree = drafter.propose(request(sequences, max_nodes=20))
    assert {(31, 32, 33), (12, 13), (11, 12, 13), (31, 32, 33, 5, 6, 7)} <= paths(tree)
    by_token = dict(zip(tree.token_ids, tree.sources, strict=True))
    assert by_token[31] == "answer_tail" and by_token[11] == "draft_tail" and by_token[5] == "prompt_fill"
    fresh, sequences = started(PreviousDraftsDrafter(), [33, 5, 6, 7])
    piece = fresh.propose(request(sequences, max_nodes=3))
    assert piece.is_chain and set(piece.sources) == {"prompt_fill"} and set(piece.token_ids) <= {33, 5, 6, 7}
    sequences.commit(0, 5)
    assert fresh.propose(request(sequences, max_nodes=2)).token_ids == [6, 7]
    bare, _ = started(PreviousDraftsDrafter(fill=False), [33, 5, 6, 7])
    bare.observe([DraftOutcome(0, CHAIN, [0], [10, 30], [10, 30, 31, 32, 33])])
    assert "prompt_fill" not in bare.propose(request(sequences, max_nodes=20)).sources


# ---------------------------------------------------------------------- recycling


def peaked(*tokens: int) -> torch.Tensor:
    """Logits with the likeliest tokens in this order."""
    logits = torch.zeros(VOCAB)
    for place, token in enumerate(tokens):
        logits[token] = 20.0 - place
    return logits


def successors(table: SuccessorTable, text: int, before: int, token: int) -> tuple[list[int], torch.Tensor]:
    found, probs = table.successors(torch.tensor(text), torch.tensor(before), torch.tensor(token), VOCAB)
    return found.tolist(), probs


def test_successors_of_pairs_go_before_those_of_tokens():
    table = SuccessorTable(2, torch.device("cpu"))
    pairs = [(1, 5), (2, 5), (NOTHING, 4)]
    table.update([(0, pairs, torch.stack([peaked(7, 8), peaked(9, 3), peaked(1, 2)]))])
    for before, token, expected in ((1, 5, [7, 8]), (2, 5, [9, 3]), (4, 5, [9, 3]), (NOTHING, 4, [1, 2])):
        assert successors(table, 0, before, token)[0] == expected
    assert torch.allclose(successors(table, 0, 1, 5)[1], peaked(7, 8).softmax(-1)[[7, 8]])
    assert successors(table, 0, 4, 6)[1].tolist() == [0, 0]


def test_the_last_slot_about_a_token_counts():
    table = SuccessorTable(2, torch.device("cpu"))
    table.update([(0, [(1, 5), (1, 5), (1, 5)], torch.stack([peaked(7, 8), peaked(9, 3), peaked(1, 2)]))])
    for before in (1, 2):
        assert successors(table, 0, before, 5)[0] == [1, 2]


def test_texts_of_a_table_learn_apart():
    table = SuccessorTable(2, torch.device("cpu"), num_texts=3)
    seen = [(2, [(1, 5)], peaked(7, 8)[None]), (0, [(1, 5), (5, 6)], torch.stack([peaked(9, 3), peaked(1, 2)]))]
    table.update(seen)
    assert successors(table, 2, 1, 5)[0] == [7, 8]
    assert successors(table, 0, 1, 5)[0] == [9, 3] and successors(table, 0, 5, 6)[0] == [1, 2]
    assert successors(table, 2, 5, 6)[1].tolist() == [0, 0] and successors(table, 1, 1, 5)[1].tolist() == [0, 0]


def proposed(drafter: Drafter, asked: DraftRequest) -> TokenTree:
    [tree] = drafter.propose_rows([asked])
    return tree


def test_recycling_follows_what_every_node_taught():
    drafter, sequences = started(RecyclingDrafter(), [1, 2])
    assert len(proposed(drafter, request(sequences))) == 0
    sequences.commit(0, 3)
    draft = TokenTree.from_paths([[4, 5], [6]], "any")
    logits = torch.stack([peaked(3), peaked(8, 9), peaked(3, 7), peaked(3)])  # after 2, 4, 5, 6
    drafter.observe([DraftOutcome(0, draft, [], [3], [3, 8, 3, 3], logits)])
    sequences.commit(0, 5)  # as after the rejected node 5
    tree = proposed(drafter, request(sequences, max_nodes=4, width=2))
    assert tree.token_ids[:2] == [3, 7] and tree.parents[:2] == [-1, -1]
    assert all(0 < confidence <= 1 for confidence in tree.confidences)
    sequences.commit(0, 4)
    assert proposed(drafter, request(sequences, width=1)).token_ids[0] == 8


def test_rows_are_recycled_together_as_each_alone():
    prompts = [[1, 2], [3, 4], [5, 6]]
    together, of_all = started(RecyclingDrafter(), *prompts)
    alone = [started(RecyclingDrafter(), rows) for rows in prompts]
    generator = torch.Generator().manual_seed(0)
    for step in range(8):
        logits = [4 * torch.randn((1, VOCAB), generator=generator) for _ in prompts]
        outcomes = []
        for row, (drafter, of_one) in enumerate(alone):
            token = (row + step * step) % 3  # seen before, soon
            of_one.commit(0, token)
            of_all.commit(row, token)
            drafter.observe([DraftOutcome(0, TokenTree(), [], [token], [], logits[row])])
            outcomes.append(DraftOutcome(row, TokenTree(), [], [token], [], logits[row]))
        together.observe(outcomes)
        limits = [dict(max_nodes=6), dict(max_nodes=6, max_depth=2), dict(max_nodes=6)]
        trees = together.propose_rows([request(of_all, row, **limit) for row, limit in enumerate(limits)])
        for row, (drafter, of_one) in enumerate(alone):
            asked = request(of_one, **limits[row])
            own, among_others = (
                mix([tree], asked.max_nodes, asked.max_depth, asked.width)
                for tree in (proposed(drafter, asked), trees[row])
            )
            assert paths(among_others) == paths(own) and among_others.confidences == own.confidences
    assert any(len(tree) > 3 for tree in trees)


def test_recycling_does_not_learn_while_it_is_not_asked():
    drafter, sequences = started(RecyclingDrafter(), [1, 2])
    for taught, asked in ((7, True), (9, False)):
        sequences.tokens[0] = [1, 2, 3]
        if asked:
            proposed(drafter, request(sequences))
        drafter.observe([DraftOutcome(0, TokenTree(), [], [3], [], peaked(taught)[None])])
    sequences.tokens[0] = [1, 2]
    assert proposed(drafter, request(sequences, width=1)).token_ids[0] == 7


def test_recycling_stays_within_its_limits():
    drafter, sequences = started(RecyclingDrafter(top_k=100), [1, 2])
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    for token in range(VOCAB):
        sequences.tokens[0] = [1, token, 9]
        proposed(drafter, request(sequences))
        drafter.observe([DraftOutcome(0, TokenTree(), [], [9], [], logits)])
    tree = proposed(drafter, request(sequences, max_nodes=5, max_depth=3, width=2))
    tree.check(VOCAB)
    assert max(tree.depths) <= 3 and max(tree.parents.count(parent) for parent in tree.parents) <= 2


# ---------------------------------------------------------------------- mixture


def tree_of(source: str, *nodes: tuple[int, int, float]) -> TokenTree:
    tree = TokenTree()
    for token, parent, confidence in nodes:
        tree.add(token, parent, source, confidence=confidence)
    return tree


def test_a_node_of_several_sources_is_one_node_and_surer():
    ours, theirs = tree_of("a", (1, -1, 0.5), (2, 0, 0.5)), tree_of("b", (3, -1, 0.4), (1, -1, 0.3))
    mixed = mix([ours, theirs], max_nodes=10, max_depth=10, max_width=None)
    assert list(zip(mixed.token_ids, mixed.parents, mixed.sources, strict=True)) == [
        (1, -1, "a+b"), (2, 0, "a"), (3, -1, "b")
    ]  # fmt: skip
    assert 0.5 < mixed.confidences[0] < 1


def test_the_likeliest_nodes_are_kept_with_their_parents():
    ours = tree_of("a", (1, -1, 0.3), (2, 0, 1.0), (3, 1, 1.0))
    theirs = tree_of("b", (4, -1, 0.6), (5, 0, 0.1), (6, -1, 0.2))
    limits = dict(max_depth=10, max_width=None)
    assert paths(mix([ours, theirs], max_nodes=1, **limits)) == {(4,)}
    assert paths(mix([ours, theirs], max_nodes=4, **limits)) == {(4,), (1,), (1, 2), (1, 2, 3)}
    assert paths(mix([ours, theirs], max_nodes=9, max_depth=1, max_width=2)) == {(4,), (1,)}
    chain = mix([ours, theirs], max_nodes=9, max_depth=9, max_width=1)
    assert chain.is_chain and chain.token_ids == [4, 5]


def test_what_a_drafter_does_not_say_is_guessed():
    tree = TokenTree.from_paths([[1, 2]], "silent")
    tree.add(3, -1, "assistant", log_prob=math.log(0.9))
    assert values(tree)[2] > values(tree)[0] > values(tree)[1] > 0


# ---------------------------------------------------------------------- in a generation


def test_the_default_without_an_assistant_is_a_mixture_of_trees():
    model = hf_specstate.enable(tiny("llama"))
    ids = prompt(6).repeat(1, 3)
    options = dict(max_new_tokens=48, do_sample=False)
    out = model.generate(ids, return_spec_states=True, spec_config={"max_nodes": 12, "strict": True}, **options)
    assert torch.equal(out.sequences, hf_specstate.disable(model).generate(ids, **options))
    rounds = out.spec_states[0].rounds
    seen = {name for r in rounds for source in r.sources for name in source.split("+")}
    assert {"history", "answer_tail", "draft_tail", "recycling"} <= seen
    assert any(len(set(r.parents)) < len(r.parents) for r in rounds)
    assert max(len(r.token_ids) for r in rounds) <= 12


@pytest.mark.parametrize("broken", MODEL_FREE)
def test_a_drafter_that_raises_is_dropped_with_one_warning(broken, monkeypatch, caplog):
    model, ids = hf_specstate.enable(tiny("llama")), prompt(6).repeat(1, 3)
    options = dict(max_new_tokens=24, do_sample=False)
    want = hf_specstate.disable(model).generate(ids, **options)
    monkeypatch.setattr(DRAFTERS[broken], "propose_rows", lambda *_: 1 / 0)
    out = hf_specstate.enable(model).generate(ids, return_spec_states=True, **options)
    assert torch.equal(out.sequences, want)
    assert [broken in message for message in caplog.messages if "left out" in message] == [True]
