"""Sampled tokens follow the target's distribution: the acceptance rules alone, then whole generations."""

import pytest
import torch
from families import noisy_copy, tiny
from scipy.stats import chisquare
from transformers import LogitsProcessorList

import hf_specstate
from hf_specstate.selection import Selection
from hf_specstate.sequences import Sequences
from hf_specstate.token_tree import TokenTree

SURE = 1e-4  # a p-value below this means another distribution


def p_value(outcomes: torch.Tensor, law: torch.Tensor) -> float:
    """Of a chi-square test that the `outcomes`, numbers below `len(law)`, were drawn from `law`."""
    counts, expected = torch.bincount(outcomes, minlength=len(law)).double(), law.double() * len(outcomes)
    rare = expected < 5  # too few for the test: one cell together
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    if expected[-1] == 0:
        if counts[-1] > 0:
            return 0.0
        counts, expected = counts[:-1], expected[:-1]
    return float(chisquare(counts, expected * counts.sum() / expected.sum()).pvalue)


# ---------------------------------------------------------------------- the acceptance rules, every row one draw

DRAWS = 200_000
P = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
Q = torch.tensor([0.2, 0.2, 0.2, 0.0, 0.4])
P_LATER = torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.0], [0.0, 0.7, 0.1, 0.1, 0.1]])  # after the first and the second node


@pytest.fixture(autouse=True)
def _seed():
    with torch.random.fork_rng():
        torch.manual_seed(20)
        yield


def select(laws: torch.Tensor, trees: list[TokenTree], rejection: bool) -> tuple[torch.Tensor, Selection]:
    """The first token of every row, when the target's law at slot `i` of each is `laws[i]`."""
    sequences = Sequences(torch.zeros((len(trees), 1), dtype=torch.long), None, 0)
    selection = Selection(LogitsProcessorList(), True, sequences, together=False, rejection=rejection)
    selection.start_round(laws.log().expand(len(trees), -1, -1), trees)
    return torch.tensor(selection.select(range(len(trees)), [0] * len(trees))), selection


def drawn(q: torch.Tensor, claimed_q: torch.Tensor | None = None) -> list[TokenTree]:
    """A drafted token a row, drawn from `q`."""
    probs = (q if claimed_q is None else claimed_q)[None]
    tokens = torch.multinomial(q, DRAWS, replacement=True).tolist()
    return [TokenTree([token], [-1], [0.0], ["drawn"], draft_probs=probs) for token in tokens]


@pytest.mark.parametrize("paths", [[], [[0, 1]], [[0, 1], [0, 2], [1, 1], [4]]], ids=["no draft", "chain", "tree"])
def test_match_draws_from_the_target(paths):
    tree = TokenTree.from_paths(paths, "any")
    laws = torch.stack([P, *P_LATER, *P_LATER, *P_LATER])[: 1 + len(tree)]
    first, selection = select(laws, [tree] * DRAWS, rejection=False)
    assert p_value(first, P) > SURE
    for token in {path[0] for path in paths} & {0, 1}:  # the rows that walked on
        rows, slot = (first == token).nonzero().flatten().tolist(), 1 + tree.child(-1, token)
        assert p_value(torch.tensor(selection.select(rows, [slot] * DRAWS)), laws[slot]) > SURE


@pytest.mark.parametrize("q", [Q, P], ids=["other law", "same law"])
def test_rejection_of_drawn_tokens(q):
    trees = drawn(q)
    first, selection = select(torch.stack([P, P_LATER[0]]), trees, rejection=True)
    assert p_value(first, P) > SURE
    accepted = [row for row, tree in enumerate(trees) if tree.token_ids[0] == first[row]]
    assert len(accepted) / DRAWS >= torch.minimum(P, q).sum() - 0.01  # as often as two laws can agree at all
    assert p_value(torch.tensor(selection.select(accepted, [1] * DRAWS)), P_LATER[0]) > SURE


@pytest.mark.parametrize("token", [0, 3, 4])
def test_rejection_of_chosen_tokens(token):
    first, _ = select(torch.stack([P, P]), [TokenTree.from_paths([[token]], "any")] * DRAWS, rejection=True)
    assert p_value(first, P) > SURE


def test_the_check_sees_tokens_pruned_by_their_own_probability():
    p, q = torch.tensor([0.5, 0.5]), torch.tensor([0.9, 0.1])
    trees = [tree if q[tree.token_ids[0]] > 0.5 else TokenTree() for tree in drawn(q)]
    first, _ = select(torch.stack([p, p]), trees, rejection=True)
    assert (first == 0).double().mean() == pytest.approx(0.55, abs=0.01)
    assert p_value(first, p) < SURE


def test_the_check_sees_drafts_from_another_law_than_claimed():
    first, _ = select(
        torch.stack([P, P]), drawn(torch.tensor([0.52, 0.28, 0.15, 0.05, 0.0]), claimed_q=P), rejection=True
    )
    assert p_value(first, P) < SURE


# ---------------------------------------------------------------------- whole generations against the exact law

SAMPLES, NEW_TOKENS, TOP_K, TEMPERATURE = 5000, 4, 3, 1.2
PROMPT = torch.tensor([[2, 7, 4, 9, 11, 5, 3, 8, 6, 10, 7, 4]])  # any token can be looked up in it
PADDED = torch.tensor([[2, 7, 4, 9, 11, 5], [0, 0, 5, 8, 3, 7]])


@pytest.fixture(scope="module")
def models():
    model = tiny("llama", vocab_size=12, hidden_size=16, intermediate_size=32, num_hidden_layers=1)
    return hf_specstate.enable(model), noisy_copy(model, noise=0.4)


@torch.no_grad()
def exact_law(model, prompt: torch.Tensor) -> dict[tuple[int, ...], float]:
    """The chance of every continuation of a `(1, length)` prompt, by plain forwards."""
    law = {(): 1.0}
    for _ in range(NEW_TOKENS):
        ids = torch.cat([prompt.expand(len(law), -1), torch.tensor(list(law), dtype=torch.long)], dim=1)
        best = (model(ids).logits[:, -1] / TEMPERATURE).topk(TOP_K)
        steps = zip(law.items(), best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True)
        law = {
            (*path, token): chance * step
            for (path, chance), tokens, chances in steps
            for token, step in zip(tokens, chances, strict=True)
        }
    return law


def samples(model, prompts: torch.Tensor, calls: int, **kwargs) -> tuple[torch.Tensor, int, int]:
    """New tokens of shape `(prompts, samples, new tokens)`, and how many tokens were drafted and accepted."""
    found, drafted, accepted = [], 0, 0
    each = SAMPLES // calls
    for _ in range(calls):
        out = model.generate(
            prompts, attention_mask=(prompts > 0).long(), do_sample=True, top_k=TOP_K, temperature=TEMPERATURE,
            max_new_tokens=NEW_TOKENS, num_return_sequences=each, return_spec_states=True, **kwargs,
        )  # fmt: skip
        found.append(out.sequences[:, prompts.shape[1] :].reshape(len(prompts), each, NEW_TOKENS))
        drafted += sum(row.num_drafted for row in out.spec_states)
        accepted += sum(row.num_accepted for row in out.spec_states)
    return torch.cat(found, dim=1), drafted, accepted


def law_p_value(model, prompt: torch.Tensor, found: torch.Tensor) -> float:
    law = exact_law(model, prompt[None, prompt > 0])
    cells = {path: cell for cell, path in enumerate(law)}
    outside = len(cells)
    outcomes = torch.tensor([cells.get(tuple(path), outside) for path in found.tolist()])
    return p_value(outcomes, torch.tensor([*law.values(), 0.0]))


# name -> (calls, configuration); few rows a call tell whether an assistant drafts the same in every call
CASES = {
    "chain": (10, {}),
    "tree": (10, {"tree_width": 2}),
    "rejection": (250, {"acceptance": "rejection"}),
    "rejection in lockstep": (1000, {"acceptance": "rejection", "lockstep": True}),
    "rejection of looked-up tokens": (10, {"acceptance": "rejection", "drafters": ["prompt_lookup"]}),
    "prompt lookup": (10, {"drafters": ["prompt_lookup"]}),
    "merged": (10, {"drafters": ["prompt_lookup", "assistant"], "tree_width": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_generations_follow_the_exact_law(models, case):
    (model, draft), (calls, config) = models, CASES[case]
    config = {"max_nodes": 4, "strict": True} | config
    found, drafted, accepted = samples(model, PROMPT, calls, assistant_model=draft, spec_config=config)
    assert 0 < accepted < drafted
    assert law_p_value(model, PROMPT[0], found[0]) > SURE


def test_prompts_of_different_lengths_keep_their_own_law(models):
    model, draft = models
    config = {"max_nodes": 4, "tree_width": 2, "strict": True}
    found, *_ = samples(model, PADDED, calls=20, assistant_model=draft, spec_config=config)
    for prompt, tokens in zip(PADDED, found, strict=True):
        assert law_p_value(model, prompt, tokens) > SURE


def test_the_check_sees_drafts_that_are_always_accepted(models, monkeypatch):
    model, draft = models
    select = Selection.select

    def gullible(self, rows, slots):
        tokens = select(self, rows, slots)
        for place, row in enumerate(rows):
            tree = self.trees[row]
            if slots[row] - 1 in tree.parents:
                tokens[place] = tree.token_ids[tree.parents.index(slots[row] - 1)]
        return tokens

    monkeypatch.setattr(Selection, "select", gullible)
    found, *_ = samples(model, PROMPT, calls=10, assistant_model=draft, spec_config={"max_nodes": 4})
    assert law_p_value(model, PROMPT[0], found[0]) < SURE
