"""The candidate generator and the logits processor: in transformers' own assisted loop, and in the package's."""

import copy
from types import SimpleNamespace

import pytest
import torch
from families import noisy_copy, prompt, tiny
from transformers import LlamaForCausalLM, LogitsProcessorList

import hf_specstate
from hf_specstate import SpecStateCandidateGenerator, SpecStateConfig, SpecStateLogitsProcessor, TokenTree
from hf_specstate.drafting import AssistantDrafter, DraftContext, DraftOutcome, PromptLookupDrafter
from hf_specstate.drafting import expectations as expectations_module
from hf_specstate.drafting.expectations import Expectations, answer_tail
from hf_specstate.scheduling import Acceptance, HeuristicLength
from hf_specstate.sequences import Sequences

NEW_TOKENS = 40
DRAFTERS = {"assistant": AssistantDrafter, "prompt lookup": PromptLookupDrafter}


class PairLlama(LlamaForCausalLM):
    """Hands the package's candidate generator to the unmodified `_assisted_decoding` of transformers."""

    def _get_candidate_generator(self, generation_config, input_ids, inputs_tensor, model_kwargs, **kwargs):
        context = DraftContext(
            model=self,
            sequences=Sequences(input_ids, None, 0),
            config=SpecStateConfig(strict=True),
            generation_config=generation_config,
            logits_processor=LogitsProcessorList(),
            input_ids=input_ids,
            model_kwargs={"attention_mask": model_kwargs["attention_mask"]},
            inputs_tensor=inputs_tensor,
            assistant_model=kwargs["assistant_model"],
            acceptance=Acceptance(),
        )
        self.outcomes = []
        candidates = SpecStateCandidateGenerator(context, [self.drafter()], HeuristicLength(4, 4, 1, remembers=False))
        observe = candidates.observe
        candidates.observe = lambda outcomes: (observe(outcomes), self.outcomes.extend(copy.deepcopy(outcomes)))
        return candidates


def llama() -> LlamaForCausalLM:
    return tiny("llama", eos_token_id=2)


def in_stock_loop(drafter: type) -> LlamaForCausalLM:
    model = llama()
    model.__class__, model.drafter = PairLlama, drafter
    return model


def generate(model, **kwargs):
    return model.generate(
        prompt(), max_new_tokens=NEW_TOKENS, suppress_tokens=[5, 6], return_dict_in_generate=True, **kwargs
    )


@pytest.fixture(scope="module")
def plain():
    return generate(llama(), output_scores=True)


@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS)
def test_the_pair_in_the_stock_loop(plain, drafter):
    model, capture = in_stock_loop(drafter), SpecStateLogitsProcessor()
    out = generate(model, assistant_model=noisy_copy(llama()), logits_processor=LogitsProcessorList([capture]))
    assert out.sequences.tolist() == plain.sequences.tolist()
    for step, scores in enumerate(plain.scores):
        torch.testing.assert_close(capture.scores_at(prompt().shape[1] + step, 0), scores[0], atol=1e-4, rtol=1e-4)
    accepted = sum(len(outcome.accepted) for outcome in model.outcomes)
    assert 0 < accepted < sum(len(outcome.tree) for outcome in model.outcomes)
    committed = [token for outcome in model.outcomes for token in outcome.token_ids]
    assert committed == plain.sequences[0, prompt().shape[1] :].tolist()
    for outcome in model.outcomes:
        assert outcome.token_ids[:-1] == [outcome.tree.token_ids[node] for node in outcome.accepted]
        assert outcome.answers[: len(outcome.token_ids)] == outcome.token_ids


@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS)
def test_the_pair_in_the_packages_loop(plain, drafter):
    model, capture = hf_specstate.enable(llama()), SpecStateLogitsProcessor()
    out = generate(
        model,
        assistant_model=noisy_copy(llama()),
        logits_processor=LogitsProcessorList([capture]),
        return_spec_states=True,
        spec_config=SpecStateConfig(drafters=[drafter()], strict=True),
    )
    assert out.sequences.tolist() == plain.sequences.tolist()
    lengths = range(prompt().shape[1], plain.sequences.shape[1])
    assert list(capture.captured) == list(lengths), "one call for each committed token, and no others"
    for step, scores in enumerate(plain.scores):
        torch.testing.assert_close(capture.scores_at(lengths[step], 0), scores[0], atol=1e-4, rtol=1e-4)
    assert 0 < out.spec_states[0].num_accepted < out.spec_states[0].num_drafted


# ---------------------------------------------------------------------- conditioning


def test_conditioned_scores_are_a_mixture():
    conditioner = SpecStateLogitsProcessor(captures=False)
    conditioner.expect(1, length=4, token=3, weight=0.3)
    scores = torch.randn(2, 6)
    before, q = scores.clone(), scores.softmax(dim=-1)
    for length in (3, 4, 5):
        got = conditioner(torch.zeros((2, length), dtype=torch.long), scores)
        want = q.clone()
        if length == 4:
            want[1] *= 0.7
            want[1, 3] += 0.3
            assert float(conditioner.plain_probs[1]) == pytest.approx(float(q[1, 3]))
        torch.testing.assert_close(got.softmax(dim=-1), want)
    assert torch.equal(scores, before), "the scores passed in are left alone"
    assert not conditioner.captured


def test_the_newest_expectation_of_a_row_counts():
    conditioner = SpecStateLogitsProcessor(captures=False)
    conditioner.expect(0, length=4, token=3, weight=0.5)
    conditioner.expect(0, length=5, token=1, weight=0.5)
    conditioner.expect(2, length=5, token=2, weight=0.5)  # a row that is not in the batch (any more)
    conditioner.expect(1, length=5, token=99, weight=0.5)  # a token beyond the vocabulary
    for length, token in ((4, None), (5, 1)):
        raised = conditioner(torch.zeros((2, length), dtype=torch.long), torch.zeros(2, 6)).nonzero().tolist()
        assert raised == ([] if token is None else [[0, token]])


def test_tokens_that_a_processor_ruled_out_are_not_expected_back():
    conditioner = SpecStateLogitsProcessor(captures=False)
    conditioner.expect(0, length=4, token=2, weight=0.9)
    scores = torch.tensor([[0.0, 1.0, -torch.inf]])
    assert torch.equal(conditioner(torch.zeros((1, 4), dtype=torch.long), scores), scores)


def expecting(weight: float = 0.2, prompt: tuple[int, ...] = (1, 2, 3), **kwargs) -> Expectations:
    sequences = Sequences(torch.tensor([prompt]), None, pad_token_id=0)
    sources = kwargs.pop("sources", ("answer_tail", "history"))
    return Expectations(SimpleNamespace(sequences=sequences), weight, sources)


def told(expectations: Expectations, row: int, tree: TokenTree, accepted: list[int], added: int, answers) -> None:
    tokens = [tree.token_ids[node] for node in accepted] + [added]
    for token in tokens:
        expectations._sequences.commit(row, token)
    expectations.observe([DraftOutcome(row, tree, accepted, tokens, answers)])


def test_a_source_that_is_right_where_the_assistant_is_not_gains_weight():
    wrong, right = expecting(sources=("answer_tail",)), expecting(sources=("answer_tail",))
    draft = TokenTree.from_paths([[10, 11]], "any")
    for _ in range(200):
        for expectations, added in ((wrong, 90), (right, 91)):
            told(expectations, 0, draft, [], 30, [30, 91, 92])  # leaves 91, 92
            expectation = expectations.next(0, [])
            assert expectation.token == 91
            expectations.note(0, [], expectation, q=0.05)
            told(expectations, 0, TokenTree(), [], added, [added])
            assert expectations.next(0, []) is None
    assert right.weights["answer_tail"] > 0.9
    assert wrong.weights["answer_tail"] < 0.02
    told(wrong, 0, draft, [], 30, [30, 91, 92])
    assert wrong.next(0, []).weight == 0.0, "it is watched, and not used"


def test_a_source_that_knows_no_more_than_the_assistant_stays_where_it_is():
    expectations = expecting(sources=("answer_tail",))
    draft = TokenTree.from_paths([[10, 11]], "any")
    for _ in range(50):
        told(expectations, 0, draft, [], 30, [30, 91, 92])
        expectations.note(0, [], expectations.next(0, []), q=1.0)
        told(expectations, 0, TokenTree(), [], 91, [91])
    assert expectations.weights["answer_tail"] == pytest.approx(0.2)


def test_history_is_expected_while_the_draft_follows_it():
    expectations = expecting(prompt=(5, 6, 7, 8, 9, 5, 6))
    assert expectations.next(0, []).token == 7 and expectations.next(0, []).source == "history"
    assert expectations.next(0, [7, 8]).token == 9
    assert expectations.next(0, [7, 1]) is None
    assert expecting(prompt=(5, 6, 7, 1, 6)).next(0, []) is None, "one token is no match"


CHAIN = TokenTree.from_paths([[10, 11, 12]], "any")
TREE = TokenTree.from_paths([[10, 11, 12], [20, 21], [10, 15]], "any")  # nodes 10 11 12 20 21 15


@pytest.mark.parametrize(
    ("tree", "accepted", "added", "answers", "tail"),
    [
        (CHAIN, [], [90], [90, 91, 92, 93], [91, 92, 93]),
        (CHAIN, [0], [91], [10, 91, 92, 93], [92, 93]),
        (CHAIN, [0, 1, 2], [93], [10, 11, 12, 93], []),
        (CHAIN, [0, 1], [], [10, 11, 92, 93], [92, 93]),
        (CHAIN, [0], [91], [], []),
        (TokenTree(), [], [90], [90], []),
        (TREE, [], [90], [90, 91, 92, 93, 94, 95, 96], [91, 92, 93]),
        (TREE, [3], [91], [20, 91, 92, 93, 94, 95, 96], [95]),
        (TREE, [0, 5], [96], [10, 15, 92, 93, 94, 95, 96], []),
    ],
    ids=["none", "one", "all", "stopped in it", "no answers", "no draft", "tree, none", "second branch", "leaf"],
)
def test_answer_tail(tree, accepted, added, answers, tail):
    tokens = [tree.token_ids[node] for node in accepted] + added
    assert answer_tail(DraftOutcome(0, tree, accepted, tokens, answers)) == tail


def drafts(conditioning: float, plain) -> list[list[int]]:
    """What an assistant drafted in each round."""
    config = SpecStateConfig(drafters=[AssistantDrafter(conditioning=conditioning)], max_nodes=5, strict=True)
    out = generate(
        hf_specstate.enable(llama()),
        assistant_model=noisy_copy(llama(), noise=0.3),
        return_spec_states=True,
        spec_config=config,
    )
    assert out.sequences.tolist() == plain.sequences.tolist()
    return [spec_round.token_ids for spec_round in out.spec_states[0]]


def test_conditioning_changes_drafts_and_never_the_text(plain):
    unconditioned, conditioned = drafts(0.0, plain), drafts(0.6, plain)
    assert unconditioned == drafts(0.0, plain)
    assert conditioned != unconditioned
    assert conditioned[:2] == unconditioned[:2], "before the first answers there is nothing to condition on"


def test_strong_conditioning_drafts_the_answer_tail(plain, monkeypatch):
    """With nearly all weight on it, whatever the target answered behind a mismatch is what is drafted next."""
    monkeypatch.setattr(expectations_module.Expectations, "_learn", lambda *_: None)
    model = in_stock_loop(lambda: AssistantDrafter(conditioning=0.999, expect_from=("answer_tail",)))
    generate(model, assistant_model=noisy_copy(llama(), noise=0.3))
    tails = list(map(answer_tail, model.outcomes))
    assert any(tails)
    for tail, following in zip(tails, model.outcomes[1:], strict=False):
        length = min(len(tail), len(following.tree))
        assert following.tree.token_ids[:length] == tail[:length]


@pytest.mark.parametrize("lockstep", [False, True], ids=["ragged", "lockstep"])
# no tree for a sliding window: while a draft is pending, its siblings take up slots of the window
@pytest.mark.parametrize(
    ("family", "tree_width"),
    [("llama", 1), ("llama", 2), ("qwen3", 2), ("mistral_sliding", 1), ("bloom", 1), ("mpt", 1)],
)
def test_unconditioned_drafts_are_what_the_assistant_would_write(family, lockstep, tree_width):
    """However rows advance, the assistant's cache holds what was committed: the text alone would not tell."""
    assert check_unconditioned_drafts(family, lockstep, tree_width) > 0


def check_unconditioned_drafts(family: str, lockstep: bool, tree_width: int) -> int:
    """How many forwards the assistant made, each draft of which must be what it would write after the text."""
    model = tiny(family)
    draft, forwards = noisy_copy(model, noise=0.05), []
    handle = draft.register_forward_hook(lambda *_: forwards.append(1))
    input_ids = torch.cat([prompt(12, seed=seed) for seed in (3, 4, 5)])
    mask = torch.ones_like(input_ids)
    input_ids[1, :3], mask[1, :3] = 0, 0
    config = SpecStateConfig(
        drafters=[AssistantDrafter(conditioning=0.0)],
        max_nodes=4 * tree_width,
        tree_width=tree_width,
        lockstep=lockstep,
        strict=True,
    )
    out = hf_specstate.enable(model).generate(
        input_ids,
        attention_mask=mask,
        assistant_model=draft,
        return_spec_states=True,
        max_new_tokens=NEW_TOKENS,
        spec_config=config,
    )
    handle.remove()
    assert 0 < sum(row.num_accepted for row in out.spec_states) < sum(row.num_drafted for row in out.spec_states)
    for row, sequence in enumerate(out.spec_states):
        start = int(mask[row].sum())
        tokens = out.sequences[row, input_ids.shape[1] - start :].tolist()
        for spec_round in sequence:
            paths: list[list[int]] = []  # the tokens that the assistant read before it wrote each node
            for node, parent in enumerate(spec_round.parents):
                before = (
                    paths[parent] + [spec_round.token_ids[parent]]
                    if parent >= 0
                    else tokens[: start + spec_round.start]
                )
                paths.append(before)
                with torch.no_grad():
                    best = draft(torch.tensor([before]), use_cache=False).logits[0, -1].topk(tree_width).indices
                siblings = spec_round.parents[:node].count(parent)
                assert spec_round.token_ids[node] == best[siblings]
    return len(forwards)


@pytest.mark.parametrize("lockstep", [False, True], ids=["ragged", "lockstep"])
def test_an_assistant_catches_up_in_pieces(lockstep, monkeypatch):
    """What it has missed, an accepted token and one of the target's, is run in two forwards."""
    at_once = check_unconditioned_drafts("llama", lockstep, 2)
    monkeypatch.setattr("hf_specstate.drafting.assistant.MOST_AT_ONCE", 1)
    assert check_unconditioned_drafts("llama", lockstep, 2) > at_once
