"""The candidate generator and the logits processor: in transformers' own assisted loop, and in the package's."""

import copy

import pytest
import torch
from families import noisy_copy, prompt, tiny
from transformers import LlamaForCausalLM, LogitsProcessorList

import hf_specstate
from hf_specstate import SpecStateCandidateGenerator, SpecStateConfig, SpecStateLogitsProcessor, TokenTree
from hf_specstate.drafting import AssistantDrafter, DraftContext, DraftOutcome, PromptLookupDrafter
from hf_specstate.drafting.assistant import answer_tail
from hf_specstate.scheduling import HeuristicLength
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


def test_expected_tokens_gain_exactly_the_strength():
    conditioner = SpecStateLogitsProcessor(strength=2.5)
    conditioner.expect(1, start=4, tokens=[3, 0])
    scores = torch.randn(2, 6)
    before = scores.clone()
    for length, token in ((3, None), (4, 3), (5, 0), (6, None)):
        gained = conditioner(torch.zeros((2, length), dtype=torch.long), scores) - before
        want = torch.zeros(2, 6)
        if token is not None:
            want[1, token] = 2.5
        torch.testing.assert_close(gained, want)
    assert torch.equal(scores, before), "the scores passed in are left alone"


def test_the_newest_expectation_of_a_row_counts():
    conditioner = SpecStateLogitsProcessor(strength=1.0)
    conditioner.expect(0, start=4, tokens=[3, 5])
    conditioner.expect(0, start=5, tokens=[1])
    conditioner.expect(2, start=5, tokens=[2])  # a row that is not in the batch (any more)
    conditioner.expect(1, start=5, tokens=[99])  # a token beyond the vocabulary
    for length, token in ((4, None), (5, 1)):
        raised = conditioner(torch.zeros((2, length), dtype=torch.long), torch.zeros(2, 6)).nonzero().tolist()
        assert raised == ([] if token is None else [[0, token]])


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
    unconditioned, conditioned = drafts(0.0, plain), drafts(3.0, plain)
    assert unconditioned == drafts(0.0, plain)
    assert conditioned != unconditioned
    assert conditioned[:2] == unconditioned[:2], "before the first answers there is nothing to condition on"


def test_strong_conditioning_drafts_the_answer_tail(plain):
    """With 1,000 logits on it, whatever the target answered behind a mismatch is what is drafted next."""
    model = in_stock_loop(lambda: AssistantDrafter(conditioning=1000.0))
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
    model = tiny(family)
    draft = noisy_copy(model, noise=0.05)
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
