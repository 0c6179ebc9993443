"""The record of a generation: what it says of every slot, against slow plain forwards, and of the drafters."""

import math

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    StaticCache,
    TemperatureLogitsWarper,
)

from hf_specstate import SpecRound, TokenTree, enable, probe
from hf_specstate.compat import CACHE_NAME
from hf_specstate.drafting import AssistantDrafter, DraftOutcome, expectations
from hf_specstate.drafting.expectations import answer_tail
from tests.families import noisy_copy, prompt, tiny
from tests.test_conformance import make_inputs
from tests.test_integrations import (
    trio,
)

GREEDY = dict(max_new_tokens=24, do_sample=False)
STRICT = dict(strict=True)
TREE = dict(strict=True, tree_width=2)
TOLERANCE = dict(atol=1e-3, rtol=1e-4)  # float32 in other shapes; the logits of another slot are off by more than 1


@torch.no_grad()
def answer(model, tokens: list[int], encoder_tokens: list[int] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """
    What `model` says after `tokens`, by a plain forward of a batch of one without a cache: its logits, of shape
    `(vocab_size,)`, and its last hidden state, of shape `(hidden_size,)`.
    """
    inputs = {"input_ids": torch.tensor([tokens])}
    if encoder_tokens is not None:
        inputs = {"input_ids": torch.tensor([encoder_tokens]), "decoder_input_ids": inputs["input_ids"]}
    outputs = model(**inputs, use_cache=False, output_hidden_states=True)
    hidden_states = outputs.hidden_states if encoder_tokens is None else outputs.decoder_hidden_states
    return outputs.logits[0, -1], hidden_states[-1][0, -1]


def paths_of(spec_round: SpecRound) -> list[list[int]]:
    """For every slot, the drafted tokens between the last committed one and the slot, its own included."""
    paths: list[list[int]] = [[]]
    for node, (token, parent) in enumerate(zip(spec_round.token_ids, spec_round.parents, strict=True)):
        assert -1 <= parent < node
        paths.append([*paths[1 + parent], token])
    return paths


# ---------------------------------------------------------------------- every slot, against plain forwards

NEW_TOKENS, NODES, TOP_K = 20, 5, 5
SEEDS = 8  # texts tried until one cell has seen drafted tokens accepted and rejected
SAMPLED = dict(do_sample=True, temperature=0.3, repetition_penalty=1.05)
CELLS = [
    ("llama", "assistant", "chain", "row", "greedy"),
    ("llama", "assistant", "tree", "row", "sampled"),
    ("llama", "assistant", "tree", "ragged", "greedy"),
    ("llama", "assistant", "chain", "ragged", "sampled"),
    ("llama", "assistant", "chain", "lockstep", "greedy"),
    ("llama", "assistant", "tree", "lockstep", "sampled"),
    ("llama", "assistant", "tree", "returned", "sampled"),
    ("llama", "prompt_lookup", "chain", "row", "greedy"),
    ("llama", "prompt_lookup", "tree", "ragged", "greedy"),
    ("llama", "prompt_lookup", "chain", "returned", "sampled"),
    ("gpt2", "assistant", "chain", "ragged", "greedy"),
    ("gpt2", "assistant", "tree", "lockstep", "greedy"),
    ("gpt2", "prompt_lookup", "tree", "row", "sampled"),
    ("mistral_sliding", "assistant", "chain", "row", "sampled"),
    ("mistral_sliding", "assistant", "tree", "ragged", "greedy"),
    ("gemma3", "assistant", "tree", "ragged", "sampled"),
    ("gemma3", "prompt_lookup", "chain", "lockstep", "greedy"),
    ("bart", "assistant", "tree", "row", "sampled"),
    ("bart", "prompt_lookup", "chain", "ragged", "greedy"),
    ("t5", "assistant", "chain", "ragged", "greedy"),
]


def check_answers(spec_round: SpecRound, context: list[int], model, encoder_tokens: list[int] | None) -> None:
    """Everything that a round says of the target, in every slot, visited or not."""
    slots = [answer(model, context + path, encoder_tokens) for path in paths_of(spec_round)]
    logits, hidden_states = (torch.stack(values) for values in zip(*slots, strict=True))
    logprobs = logits.log_softmax(dim=-1)
    torch.testing.assert_close(spec_round.logits, logits, **TOLERANCE)
    torch.testing.assert_close(spec_round.hidden_states, hidden_states, **TOLERANCE)

    assert len(spec_round.target_token_ids) == len(slots)
    chosen = logits.gather(1, torch.tensor(spec_round.target_token_ids)[:, None])
    best = logits.max(dim=-1, keepdim=True).values
    assert (chosen >= best - 2 * TOLERANCE["atol"]).all()  # of two that are level, either will do

    assert len(spec_round.target_logprobs) == len(spec_round.token_ids)
    for token, parent, logprob in zip(
        spec_round.token_ids, spec_round.parents, spec_round.target_logprobs, strict=True
    ):
        assert logprob == pytest.approx(float(logprobs[1 + parent, token]), abs=1e-3, rel=1e-4)

    assert spec_round.top_token_ids.shape == (len(slots), TOP_K) and spec_round.top_token_ids.dtype == torch.long
    assert all(len(set(tokens)) == TOP_K for tokens in spec_round.top_token_ids.tolist())
    torch.testing.assert_close(spec_round.top_logprobs, logprobs.topk(TOP_K).values, **TOLERANCE)
    torch.testing.assert_close(spec_round.top_logprobs, logprobs.gather(1, spec_round.top_token_ids), **TOLERANCE)


def check_walk(spec_round: SpecRound, tokens: list[int], is_greedy: bool, may_stop_at_a_draft: bool) -> None:
    """What was committed: a path of the tree from its root down, then at most one token that is not in the tree."""
    node = -1
    for accepted in spec_round.accepted:
        assert spec_round.parents[accepted] == node
        node = accepted
    committed = spec_round.committed_token_ids
    assert committed and committed == tokens[spec_round.start : spec_round.start + len(committed)]
    drafted = zip(spec_round.token_ids, spec_round.parents, strict=True)
    assert spec_round.added_token_id not in [token for token, parent in drafted if parent == node]
    assert spec_round.added_token_id is not None or may_stop_at_a_draft
    if is_greedy:
        visited = [0, *(1 + node for node in spec_round.accepted)]
        assert committed == [spec_round.target_token_ids[slot] for slot in visited][: len(committed)]


def check_drafts(spec_round: SpecRound, drafter: str) -> None:
    nodes = len(spec_round.token_ids)
    assert nodes <= spec_round.num_planned <= NODES
    assert spec_round.sources == [drafter] * nodes
    assert len(spec_round.draft_logprobs) == nodes
    if drafter == "assistant":
        assert all(-math.inf < logprob < 1e-6 for logprob in spec_round.draft_logprobs)
    else:
        assert all(map(math.isnan, spec_round.draft_logprobs))


@pytest.mark.parametrize(("family", "drafter", "shape", "rows", "decoding"), CELLS)
def test_every_slot_against_a_plain_forward(family, drafter, shape, rows, decoding):
    plain, model = tiny(family), enable(tiny(family))
    is_encoder_decoder, is_greedy = plain.config.is_encoder_decoder, decoding == "greedy"
    copies = 2 if rows == "returned" else 1
    options = dict(max_new_tokens=NEW_TOKENS, return_dict_in_generate=True, output_hidden_states=True)
    options |= dict(do_sample=False) if is_greedy else SAMPLED | dict(num_return_sequences=copies)
    options["spec_config"] = dict(
        drafters=[drafter], max_nodes=NODES, tree_width=2 if shape == "tree" else 1, lockstep=rows == "lockstep",
        record="full", record_top_k=TOP_K, strict=True,
    )  # fmt: skip
    may_stop_at_a_draft = rows == "lockstep" or probe(plain).rows == "lockstep"
    accepted = rejected = 0
    for seed in range(SEEDS):
        inputs = make_inputs(plain, rows != "row", seed)
        if rows != "row":  # one of them ends early
            free = plain.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
            options["eos_token_id"] = int(free[1, 8 - NEW_TOKENS])
        draft = noisy_copy(plain, noise=0.1 * (1 + seed % 4))
        torch.manual_seed(seed)
        out = model.generate(**inputs, **options, assistant_model=draft, return_spec_states=True)
        prompts = [
            ids[mask.bool()].tolist()
            for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
            for _ in range(copies)
        ]
        prompt_length = 1 if is_encoder_decoder else inputs["input_ids"].shape[1]
        assert out.spec_states.num_left_out == 0
        for read, ids, sequence in zip(prompts, out.sequences.tolist(), out.spec_states, strict=True):
            assert sequence.prompt_token_ids == (ids[:1] if is_encoder_decoder else read)
            tokens, start = ids[prompt_length:], 0
            for index, spec_round in enumerate(sequence):
                assert (spec_round.index, spec_round.start) == (index, start)
                context = sequence.prompt_token_ids + tokens[:start]
                check_answers(spec_round, context, plain, read if is_encoder_decoder else None)
                is_last = index == len(sequence) - 1
                check_walk(spec_round, tokens, is_greedy, is_last or may_stop_at_a_draft)
                check_drafts(spec_round, drafter)
                start += len(spec_round.committed_token_ids)
            assert not any(tokens[start:])  # padding
            assert sequence[0].token_ids == [] and sequence[0].num_planned == 0  # the prefill
        accepted += out.spec_states.num_accepted
        rejected += out.spec_states.num_wasted
        if accepted and rejected:
            return
    pytest.fail(f"{accepted} drafted tokens accepted and {rejected} rejected in {SEEDS} texts: nothing was shown")


def test_the_padding_of_a_forward_is_not_recorded():
    """Over a static cache only a few widths occur."""
    model, reference, draft = trio()
    cache, widths = StaticCache(config=reference.config, max_cache_len=64), []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    out = model.generate(
        prompt(), **GREEDY, **{CACHE_NAME: cache}, assistant_model=draft, return_spec_states=True,
        spec_config=STRICT | dict(max_nodes=NODES, record="full", record_top_k=TOP_K),
        return_dict_in_generate=True, output_hidden_states=True,
    )  # fmt: skip
    sequence, tokens = out.spec_states[0], out.sequences[0, 8:].tolist()
    for spec_round in sequence:
        check_answers(spec_round, sequence.prompt_token_ids + tokens[: spec_round.start], reference, None)
        check_walk(spec_round, tokens, is_greedy=True, may_stop_at_a_draft=spec_round is sequence[-1])
    assert [spec_round.width for spec_round in sequence[1:]] == widths[1:]
    assert any(spec_round.width > 1 + len(spec_round.token_ids) for spec_round in sequence[1:])


def test_in_lockstep_a_round_may_end_at_a_drafted_token():
    """Its row was about to walk on when another one had to stop."""
    plain, model = tiny("llama"), enable(tiny("llama"))
    for seed in range(SEEDS):
        inputs = make_inputs(plain, True, seed)
        out = model.generate(
            **inputs, **GREEDY, assistant_model=noisy_copy(plain), return_spec_states=True,
            spec_config=TREE | dict(lockstep=True),
        )  # fmt: skip
        for rounds in zip(*out.spec_states, strict=True):
            assert len({len(spec_round.committed_token_ids) for spec_round in rounds}) == 1
        tokens = out.sequences[:, inputs["input_ids"].shape[1] :].tolist()
        assert [sequence.token_ids for sequence in out.spec_states] == tokens
        if any(spec_round.added_token_id is None for sequence in out.spec_states for spec_round in sequence[:-1]):
            return
    pytest.fail("every round of every row added a token")


# ---------------------------------------------------------------------- what the drafters thought

PENALTY, TEMPERATURE = 1.1, 0.7
DRAWN = dict(do_sample=True, temperature=TEMPERATURE, repetition_penalty=PENALTY, top_k=0)
PROCESSORS = [RepetitionPenaltyLogitsProcessor(PENALTY), TemperatureLogitsWarper(TEMPERATURE)]
DRAFTING = {  # name -> (options of the call, fields of its configuration, the processors that come of it)
    "greedy": (dict(do_sample=False), dict(tree_width=2), []),
    "match": (DRAWN, dict(tree_width=2), PROCESSORS),
    "rejection": (DRAWN, dict(acceptance="rejection"), PROCESSORS),
}


@pytest.mark.parametrize("conditioning", [0.0, 0.4], ids=["unconditioned", "conditioned"])
@pytest.mark.parametrize("way", DRAFTING)
def test_draft_logprobs_of_an_assistant(way, conditioning, monkeypatch):
    monkeypatch.setattr(expectations.Expectations, "_learn", lambda *_: None)  # the weight stays what it is
    model, reference, _ = trio()
    draft = noisy_copy(reference, noise=0.2)
    options, config, processors = DRAFTING[way]
    config = (
        STRICT | config | dict(drafters=[AssistantDrafter(conditioning=conditioning, expect_from=("answer_tail",))])
    )
    torch.manual_seed(0)
    out = model.generate(
        prompt(12), **options, max_new_tokens=24, assistant_model=draft, spec_config=config, return_spec_states=True
    )
    sequence, process = out.spec_states[0], LogitsProcessorList(processors)
    conditioned, tail = 0, []  # what the target had answered behind the mismatch of the round before
    for spec_round in sequence:
        context, paths = sequence.prompt_token_ids + sequence.token_ids[: spec_round.start], paths_of(spec_round)
        for token, parent, logprob in zip(
            spec_round.token_ids, spec_round.parents, spec_round.draft_logprobs, strict=True
        ):
            path = paths[1 + parent]
            logits, _ = answer(draft, context + path)
            probs = process(torch.tensor([context + path]), logits[None])[0].softmax(dim=-1)
            if len(path) < len(tail):
                probs = (1 - conditioning) * probs
                probs[tail[len(path)]] += conditioning
                conditioned += 1
            assert logprob == pytest.approx(float(probs[token].log()), abs=1e-3)
        tree = TokenTree(spec_round.token_ids, spec_round.parents, spec_round.draft_logprobs, spec_round.sources)
        accepted, tokens = spec_round.accepted, spec_round.committed_token_ids
        tail = answer_tail(DraftOutcome(0, tree, accepted, tokens, spec_round.target_token_ids))
    assert sequence.num_drafted and conditioned


@pytest.mark.parametrize("drafter", ["prompt_lookup", "stock"])
def test_looked_up_tokens_are_point_masses(drafter):
    model, reference, _ = trio()
    inputs = make_inputs(reference, True, seed=0)
    out = model.generate(**inputs, **GREEDY, return_spec_states=True, spec_config=STRICT | dict(drafters=[drafter]))
    assert out.spec_states.num_drafted
    assert all(math.isnan(p) for sequence in out.spec_states for r in sequence for p in r.draft_logprobs)


def test_a_merged_tree_keeps_what_each_drafter_thought():
    model, reference, draft = trio()
    config = TREE | dict(drafters=["prompt_lookup", "assistant"])
    inputs = make_inputs(reference, True, seed=0)
    out = model.generate(**inputs, **GREEDY, assistant_model=draft, return_spec_states=True, spec_config=config)
    nodes = [
        (source, math.isnan(logprob))
        for sequence in out.spec_states
        for spec_round in sequence
        for source, logprob in zip(spec_round.sources, spec_round.draft_logprobs, strict=True)
    ]
    # a token of both is looked up first, and thus a point mass
    assert set(nodes) == {("prompt_lookup", True), ("assistant", False), ("prompt_lookup+assistant", True)}


@pytest.mark.parametrize("threshold", [None, 1.0], ids=["no threshold", "threshold"])
@pytest.mark.parametrize("schedule", ["constant", "heuristic_transient"])
def test_what_the_schedule_allowed(schedule, threshold):
    """Whatever was drafted of it: an assistant that is never sure enough drafts one token."""
    model, _, draft = trio()
    out = model.generate(
        prompt(), assistant_model=draft, num_assistant_tokens=5, num_assistant_tokens_schedule=schedule,
        assistant_confidence_threshold=threshold, max_new_tokens=40, do_sample=False, return_spec_states=True,
    )  # fmt: skip
    prefill, *rounds = out.spec_states[0]
    assert prefill.num_planned == 0
    allowed = 5
    for spec_round in rounds:
        drafted = len(spec_round.token_ids)
        room = 40 - spec_round.start - 1  # the target adds the last token
        assert spec_round.num_planned == (allowed if room else 0)
        assert drafted == min(spec_round.num_planned, room, 1 if threshold else 40)
        assert spec_round.expected_tokens is None
        if schedule != "constant" and drafted:
            allowed = allowed + 2 if spec_round.num_accepted == drafted else max(1, allowed - 1)
