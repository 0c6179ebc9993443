"""
The record of a generation: what it says of every slot against slow plain forwards, what it counts against the text, and
that it is delivered whole, as it comes, and only to who asked for it.
"""

import copy
import logging
import math
import time
from collections import Counter, defaultdict
from dataclasses import fields

import pytest
import torch
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    MaxLengthCriteria,
    RepetitionPenaltyLogitsProcessor,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
)

from hf_specstate import SpecRound, SpecSequence, SpecStates, TokenTree, enable, probe
from hf_specstate.compat import CACHE_NAME
from hf_specstate.drafting import AssistantDrafter, DraftOutcome, expectations
from hf_specstate.drafting.expectations import answer_tail
from tests.families import VOCAB, noisy_copy, prompt, tiny
from tests.test_conformance import make_inputs
from tests.test_integrations import (
    Collector,
    Interrupted,
    RaisingCriterion,
    RaisingProcessor,
    early_end,
    padded,
    spoken_trio,
    trio,
)
from tests.test_validation import assert_refused, llama

GREEDY = dict(max_new_tokens=24, do_sample=False)
STRICT = dict(strict=True)
TREE = dict(strict=True, tree_width=2)
TOLERANCE = dict(atol=1e-3, rtol=1e-4)  # float32 in other shapes; the logits of another slot are off by more than 1
INPUTS = pytest.mark.parametrize("inputs", [lambda: dict(input_ids=prompt()), padded], ids=["one row", "padded rows"])
TENSORS = ("top_token_ids", "top_logprobs", "logits", "hidden_states")


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


# ---------------------------------------------------------------------- numbers


def recount(rounds: list[SpecRound]) -> dict:
    """The derived numbers, counted anew."""
    drafted, accepted = Counter(), Counter()  # by source
    at_depth: dict[int, list[bool]] = defaultdict(list)
    committed: list[int] = []  # tokens of each round after the prefill
    total = nodes = taken = 0
    for spec_round in rounds:
        depths: dict[int, int] = {}
        for node, parent in enumerate(spec_round.parents):
            depths[node] = 1 if parent == -1 else depths[parent] + 1
        for depth in set(depths.values()):
            at_depth[depth].append(any(depths[node] == depth for node in spec_round.accepted))
        nodes += len(spec_round.sources)
        taken += len(spec_round.accepted)
        for node, source in enumerate(spec_round.sources):  # "a+b" is a token that both proposed
            drafted.update(source.split("+"))
            accepted.update(source.split("+") if node in spec_round.accepted else ())
        tokens = len(spec_round.accepted) + (spec_round.added_token_id is not None)
        total += tokens
        committed += [tokens] if spec_round.index else []
    return dict(
        num_tokens=total,
        num_forwards=len(rounds),
        num_drafted=nodes,
        num_accepted=taken,
        num_wasted=nodes - taken,
        acceptance_rate=taken / nodes,
        mean_tokens_per_forward=sum(committed) / len(committed),
        acceptance_by_depth={depth: sum(hits) / len(hits) for depth, hits in at_depth.items()},
        drafted_by_source=dict(drafted),
        accepted_by_source={source: accepted[source] for source in drafted},
        acceptance_by_source={source: accepted[source] / drafted[source] for source in drafted},
    )


def assert_counted(statistics, rounds: list[SpecRound]) -> None:
    for name, value in recount(rounds).items():
        found = getattr(statistics, name)
        assert found == (pytest.approx(value) if not isinstance(value, int) else value), name


def test_numbers_are_those_of_the_text():
    model, reference, draft = trio()
    config = TREE | dict(drafters=["prompt_lookup", "assistant"])
    eos = early_end(reference, **padded())
    options = GREEDY | dict(eos_token_id=eos)
    out = model.generate(**padded(), **options, assistant_model=draft, return_spec_states=True, spec_config=config)
    states = out.spec_states
    texts = out.sequences[:, padded()["input_ids"].shape[1] :].tolist()
    texts = [text[: text.index(eos) + 1] if eos in text else text for text in texts]
    assert len({len(text) for text in texts}) > 1
    assert [sequence.token_ids for sequence in states] == texts
    assert states.num_tokens == sum(map(len, texts))

    assert_counted(states, [spec_round for sequence in states for spec_round in sequence])
    for sequence in states:
        assert_counted(sequence, list(sequence))
        assert sequence.seconds == pytest.approx(sum(spec_round.seconds for spec_round in sequence))
    for name, of_sequence in (
        ("num_target_forwards", lambda sequence: len(sequence.rounds)),
        ("num_drafted_tokens", lambda sequence: sum(len(r.token_ids) for r in sequence)),
        ("num_accepted_tokens", lambda sequence: sum(len(r.accepted) for r in sequence)),
    ):
        assert out[name].dtype == torch.long
        assert out[name].tolist() == [of_sequence(sequence) for sequence in states], name

    for sequence in states:
        sources = sequence.token_sources
        assert len(sources) == sequence.num_tokens
        assert sources.count(None) == sum(r.added_token_id is not None for r in sequence)
        names = [[] if source is None else source.split("+") for source in sources]
        by_source = {source: sum(source in known for known in names) for source in sequence.drafted_by_source}
        assert by_source == sequence.accepted_by_source
        assert sequence.drafted_mask() == [source is not None for source in sources]
        for source in ("prompt_lookup", "assistant", "nobody"):
            assert sequence.drafted_mask(source) == [source in known for known in names]


BLOCK = 5  # tokens of a round: four of a draft that is always right, and the one that the target adds


def speculate_in_blocks(ids: torch.Tensor, **options):
    """A call whose drafts are always right."""
    model, reference, _ = trio()
    return model.generate(
        ids, **(GREEDY | options), assistant_model=reference, num_assistant_tokens=BLOCK - 1, spec_config=STRICT,
        return_spec_states=True,
    )  # fmt: skip


def assert_ends_at_a_drafted_token(out, text: list[int], reason: str) -> None:
    """`text` ends inside of a block; everything is counted to its end and not further."""
    sequence, last = out.spec_states[0], out.spec_states[0][-1]
    blocks, rest = divmod(len(text) - 1, BLOCK)  # the prefill gave one token
    assert 0 < rest < BLOCK - 1, "the test needs an end before the draft's"
    assert out.sequences[0, 8:].tolist() == sequence.token_ids == text
    assert last.accepted == list(range(rest)) and last.added_token_id is None
    assert last.committed_token_ids == text[-rest:]
    assert [r.stop_reason for r in sequence] == [None] * (blocks + 1) + [reason]
    assert sequence.stop_reason == reason
    assert sequence.token_sources == [None if place % BLOCK == 0 else "assistant" for place in range(len(text))]
    assert (sequence.num_tokens, sequence.num_forwards) == (len(text), 1 + blocks + 1)
    assert sequence.num_drafted == (BLOCK - 1) * (blocks + 1)
    assert sequence.num_accepted == (BLOCK - 1) * blocks + rest
    assert sequence.mean_tokens_per_forward == pytest.approx((len(text) - 1) / (blocks + 1))
    counts = (out.num_target_forwards, out.num_drafted_tokens, out.num_accepted_tokens)
    assert [count.tolist() for count in counts] == [
        [sequence.num_forwards], [sequence.num_drafted], [sequence.num_accepted]
    ]  # fmt: skip


def test_an_end_of_sequence_that_was_drafted():
    reference = tiny("llama")
    for seed in range(30):
        text = reference.generate(prompt(8, seed=seed), **GREEDY)[0, 8:].tolist()
        for place in range(BLOCK + 1, 3 * BLOCK):
            if text[place] not in text[:place] and 0 < place % BLOCK < BLOCK - 1:
                out = speculate_in_blocks(prompt(8, seed=seed), eos_token_id=text[place])
                assert_ends_at_a_drafted_token(out, text[: place + 1], "eos")
                return
    pytest.fail("no text has a new token at such a place")


def test_a_length_that_ends_inside_of_an_accepted_draft():
    """Drafts stay within the call's own limit; a criterion may have a nearer one."""
    text = tiny("llama").generate(prompt(8), **GREEDY)[0, 8:].tolist()
    criteria = StoppingCriteriaList([MaxLengthCriteria(max_length=8 + 9)])
    assert_ends_at_a_drafted_token(speculate_in_blocks(prompt(8), stopping_criteria=criteria), text[:9], "length")


def test_a_draft_leaves_room_for_the_last_token():
    text = tiny("llama").generate(prompt(8), **GREEDY)[0, 8:].tolist()
    out = speculate_in_blocks(prompt(8), max_new_tokens=9)
    last = out.spec_states[0][-1]
    assert out.sequences[0, 8:].tolist() == out.spec_states[0].token_ids == text[:9]
    assert (last.token_ids, last.accepted) == (text[6:8], [0, 1])
    assert (last.added_token_id, last.stop_reason) == (text[8], "length")
    assert out.spec_states[0].token_sources[-3:] == ["assistant", "assistant", None]


def test_numbers_of_rounds_made_by_hand():
    wide = SpecRound(
        index=1, start=1, token_ids=[5, 6, 7, 8], parents=[-1, -1, 0, 2], sources=["a", "b", "a", "b"],
        accepted=[0, 2], added_token_id=9,
    )  # fmt: skip
    missed = SpecRound(index=2, start=4, token_ids=[3], parents=[-1], sources=["c"], added_token_id=4)
    undrafted = SpecRound(index=3, start=5, added_token_id=2, stop_reason="eos")
    sequence = SpecSequence([1, 2], [SpecRound(index=0, start=0, added_token_id=1), wide, missed, undrafted])
    assert wide.depths == [1, 1, 2, 3] and wide.committed_token_ids == [5, 7, 9]
    assert sequence.token_ids == [1, 5, 7, 9, 4, 2]
    assert sequence.token_sources == [None, "a", "a", None, None, None]
    assert sequence.drafted_mask() == sequence.drafted_mask("a") == [False, True, True, False, False, False]
    for statistics in (sequence, SpecStates([sequence, SpecSequence()]), SpecStates([sequence, sequence])):
        assert statistics.acceptance_by_depth == {1: 1 / 2, 2: 1.0, 3: 0.0}
        assert statistics.acceptance_by_source == {"a": 1.0, "b": 0.0, "c": 0.0}
        assert statistics.acceptance_rate == 2 / 5
        assert statistics.mean_tokens_per_forward == pytest.approx(5 / 3)
    assert sequence.stop_reason == "eos"
    nothing = SpecSequence([1], [SpecRound(index=0, start=0, added_token_id=1)])
    assert math.isnan(nothing.acceptance_rate) and math.isnan(nothing.mean_tokens_per_forward)
    assert nothing.acceptance_by_depth == nothing.acceptance_by_source == {}
    assert nothing.stop_reason is None


# ---------------------------------------------------------------------- why rows ended


class EndsOneRow(StoppingCriteria):
    def __init__(self, row: int, length: int):
        self.row = row
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        ended = torch.zeros(len(input_ids), dtype=torch.bool)
        ended[self.row] = input_ids.shape[1] >= self.length
        return ended


class EndsAtCall(StoppingCriteria):
    """Ends everything when it is asked for the `calls`-th time, so it must be asked once a token."""

    def __init__(self, calls: int):
        self.calls = calls

    def __call__(self, input_ids, scores, **kwargs):
        self.calls -= 1
        return torch.full((len(input_ids),), self.calls <= 0)


def reasons_of(states: SpecStates) -> list[str | None]:
    """Why each row ended; said by its last round and no other."""
    for sequence in states:
        assert all(spec_round.stop_reason is None for spec_round in sequence[:-1])
        assert sequence.stop_reason == sequence[-1].stop_reason
    return [sequence.stop_reason for sequence in states]


def three_ends() -> tuple[torch.Tensor, int]:
    """
    Three prompts, and an EOS token that ends the first text early, the second not before its 10th token, the third not.
    """
    reference = tiny("llama")
    for seed in range(20):
        ids = torch.cat([prompt(8, seed=3 * seed + row) for row in range(3)])
        first, second, third = reference.generate(ids, **GREEDY)[:, 8:].tolist()
        for token in first[3:10]:
            if token not in [0, *second[:9], *third]:
                return ids, token
    raise AssertionError("no such texts")


@pytest.mark.parametrize("shape", [STRICT, TREE], ids=["chain", "tree"])
def test_rows_end_for_their_own_reasons(shape):
    model, reference, draft = trio()
    ids, eos = three_ends()
    options = GREEDY | dict(eos_token_id=eos)
    drafting = dict(assistant_model=draft, spec_config=shape, return_spec_states=True)
    out = model.generate(ids, **options, **drafting)
    assert torch.equal(out.sequences, reference.generate(ids, **options))
    reasons = reasons_of(out.spec_states)
    assert (reasons[0], reasons[2]) == ("eos", "length")

    options["stopping_criteria"] = StoppingCriteriaList([EndsOneRow(row=1, length=8 + 9)])
    out = model.generate(ids, **options, **drafting)
    assert torch.equal(out.sequences, reference.generate(ids, **options))
    assert reasons_of(out.spec_states) == ["eos", "criterion", "length"]
    assert [sequence.num_tokens for sequence in out.spec_states][1:] == [9, 24]


@INPUTS
def test_a_criterion_of_the_users(inputs):
    model, reference, draft = trio()
    want = reference.generate(**inputs(), **GREEDY, stopping_criteria=StoppingCriteriaList([EndsAtCall(10)]))
    out = model.generate(
        **inputs(), **GREEDY, stopping_criteria=StoppingCriteriaList([EndsAtCall(10)]), assistant_model=draft,
        spec_config=STRICT, return_spec_states=True,
    )  # fmt: skip
    assert torch.equal(out.sequences, want)
    assert set(reasons_of(out.spec_states)) == {"criterion"}
    assert {sequence.num_tokens for sequence in out.spec_states} == {10}


@INPUTS
def test_no_time_left(inputs):
    model, _, draft = trio()
    out = model.generate(
        **inputs(), **GREEDY, max_time=1e-9, assistant_model=draft, spec_config=STRICT, return_spec_states=True
    )
    assert set(reasons_of(out.spec_states)) == {"criterion"}
    assert {(len(sequence), sequence.num_tokens) for sequence in out.spec_states} == {(1, 1)}


def test_stop_strings():
    model, reference, draft, tokenizer = spoken_trio()
    inputs = tokenizer(["hello", "good day"], return_tensors="pt", padding=True, return_token_type_ids=False)
    free = reference.generate(**inputs, **GREEDY)[:, inputs["input_ids"].shape[1] :]
    unused = next(token for token in range(4, len(tokenizer)) if token not in free)
    # without an EOS token, a row that has ended would go on until all have
    options = GREEDY | dict(stop_strings=[tokenizer.decode(free[0])[5:7]], tokenizer=tokenizer, eos_token_id=unused)
    out = model.generate(**inputs, **options, assistant_model=draft, spec_config=STRICT, return_spec_states=True)
    assert torch.equal(out.sequences, reference.generate(**inputs, **options))
    reasons = reasons_of(out.spec_states)
    assert reasons[0] == "stop_string" and out.spec_states[0].num_tokens < 24
    assert reasons[1] == ("stop_string" if out.spec_states[1].num_tokens < 24 else "length")


# ---------------------------------------------------------------------- how much is kept

KEPT = {"ids": 0, "topk": 2, "full": 3}  # the first so many of TENSORS; hidden states are asked for separately


def kept(spec_round: SpecRound) -> tuple[str, ...]:
    return tuple(name for name in TENSORS if getattr(spec_round, name) is not None)


def test_levels_of_the_record():
    model, reference, draft = trio()
    sampling = dict(max_new_tokens=16, do_sample=True, temperature=0.3)

    def generate(**config):
        torch.manual_seed(0)
        return model.generate(
            **padded(), **sampling, assistant_model=draft, spec_config=TREE | config, return_spec_states=bool(config)
        )

    unrecorded = generate()
    by_level = {record: generate(record=record) for record in KEPT}
    for record, out in by_level.items():
        assert torch.equal(out.sequences, unrecorded)  # the record changes neither the text nor the random numbers
        assert out.spec_states.num_left_out == 0
        for sequence, in_full in zip(out.spec_states, by_level["full"].spec_states, strict=True):
            for spec_round, known in zip(sequence, in_full, strict=True):
                assert kept(spec_round) == TENSORS[: KEPT[record]]
                for name in ("token_ids", "parents", "sources", "accepted", "added_token_id", "target_token_ids"):
                    assert getattr(spec_round, name) == getattr(known, name)
                assert spec_round.target_logprobs == pytest.approx(known.target_logprobs, abs=1e-5)
                slots = 1 + len(spec_round.token_ids)
                if record != "ids":
                    assert spec_round.top_token_ids.shape == spec_round.top_logprobs.shape == (slots, 8)
                if record == "full":
                    assert spec_round.logits.shape == (slots, VOCAB)
    default = model.generate(**padded(), **GREEDY, return_spec_states=True)
    assert {kept(spec_round) for sequence in default.spec_states for spec_round in sequence} == {()}


def test_more_candidates_than_tokens():
    model, _, draft = trio()
    config = STRICT | dict(record="topk", record_top_k=10 * VOCAB)
    out = model.generate(prompt(), **GREEDY, assistant_model=draft, spec_config=config, return_spec_states=True)
    for spec_round in out.spec_states[0]:
        slots = 1 + len(spec_round.token_ids)
        assert spec_round.top_token_ids.sort().values.tolist() == [list(range(VOCAB))] * slots
        torch.testing.assert_close(spec_round.top_logprobs.exp().sum(dim=-1), torch.ones(slots))


@INPUTS
def test_what_is_too_large_is_left_out(inputs, caplog):
    model, _, draft = trio()

    def generate(**config) -> SpecStates:
        return model.generate(
            **inputs(), **GREEDY, assistant_model=draft, spec_config=STRICT | dict(record="full") | config,
            return_spec_states=True, return_dict_in_generate=True, output_hidden_states=True,
        ).spec_states  # fmt: skip

    def forwards(states: SpecStates) -> list[list[SpecRound]]:
        """The rounds of all rows, by forward."""
        by_index: dict[int, list[SpecRound]] = defaultdict(list)
        for sequence in states:
            for spec_round in sequence:
                by_index[spec_round.index].append(spec_round)
        return list(by_index.values())

    with caplog.at_level(logging.WARNING, logger="hf_specstate"):
        whole = generate()
        assert not [record for record in caplog.records if record.name.startswith("hf_specstate")]
        sizes = [sum(r.logits.nbytes + r.hidden_states.nbytes for r in rounds) for rounds in forwards(whole)]
        limit = sizes[0] + sizes[1]
        capped = generate(record_max_bytes=limit)
    warned = [record.getMessage() for record in caplog.records if record.name.startswith("hf_specstate")]
    assert len(warned) == 1 and "record_max_bytes" in warned[0]

    assert whole.num_left_out == 0
    is_whole = []
    for rounds in forwards(capped):
        (tensors,) = {kept(spec_round) for spec_round in rounds}
        assert tensors in (TENSORS, TENSORS[:2])
        is_whole.append(tensors == TENSORS)
    assert is_whole[0] and not all(is_whole)
    assert sum(size for size, here in zip(sizes, is_whole, strict=True) if here) <= limit
    assert capped.num_left_out == is_whole.count(False)
    if len(capped) == 1:  # in a batch, the padding may count
        assert is_whole == [True, True] + [False] * (len(sizes) - 2)
    for theirs, ours in zip(whole, capped, strict=True):
        for known, spec_round in zip(theirs, ours, strict=True):
            assert spec_round.target_token_ids == known.target_token_ids
            assert torch.equal(spec_round.top_token_ids, known.top_token_ids)


@pytest.mark.parametrize(
    "field, value",
    [
        ("record", "everything"),
        ("record", None),
        ("record", True),
        ("record_top_k", -1),
        ("record_top_k", 2.5),
        ("record_top_k", True),
        ("record_top_k", None),
        ("record_max_bytes", -1),
        ("record_max_bytes", "1 GB"),
        ("record_max_bytes", True),
    ],
)
def test_levels_that_do_not_exist(field, value):
    assert_refused(llama(), f"`spec_config.{field}`", spec_config={field: value})
    assert_refused(llama(), f"`spec_config.{field}`", spec_config={field: value}, return_spec_states=True)


# ---------------------------------------------------------------------- what it cost


def slowed(model, seconds: float):
    model.register_forward_hook(lambda *_: time.sleep(seconds))
    return model


def test_seconds():
    model, _, draft = trio()
    options = GREEDY | dict(assistant_model=draft, spec_config=STRICT, return_spec_states=True)
    model.generate(prompt(), **options)  # from now on it is known what the models can do
    slowed(model, 0.02), slowed(draft, 0.005)
    start = time.perf_counter()
    out = model.generate(prompt(), **options)
    wall = time.perf_counter() - start
    sequence = out.spec_states[0]
    assert len(sequence) > 3
    for spec_round in sequence:
        parts = (spec_round.draft_seconds, spec_round.verify_seconds, spec_round.other_seconds)
        assert all(isinstance(seconds, float) and seconds >= 0 for seconds in parts)
        assert spec_round.verify_seconds > 0.019
        assert not spec_round.token_ids or spec_round.draft_seconds > 0.0049
        assert spec_round.seconds == sum(parts)
    assert wall / 2 <= sequence.seconds <= wall


@pytest.mark.parametrize("lockstep", [False, True], ids=["ragged", "lockstep"])
def test_rows_and_width_of_a_forward(lockstep):
    model, reference, draft = trio()
    options = GREEDY | dict(eos_token_id=early_end(reference, **padded()))
    widths = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    out = model.generate(
        **padded(), **options, assistant_model=draft, spec_config=TREE | dict(lockstep=lockstep),
        return_spec_states=True,
    )  # fmt: skip
    num_rows = []
    for index in range(max(map(len, out.spec_states))):
        rounds = [sequence[index] for sequence in out.spec_states if len(sequence) > index]
        num_rows.append(len(rounds))
        width = widths[index] if index else 1
        assert width == 1 + max(len(spec_round.token_ids) for spec_round in rounds)
        assert {(r.index, r.num_rows, r.width) for r in rounds} == {(index, len(rounds), width)}
        assert len({(r.draft_seconds, r.verify_seconds, r.other_seconds) for r in rounds}) == 1
    assert num_rows == sorted(num_rows, reverse=True) and len(set(num_rows)) > 1


# ---------------------------------------------------------------------- rounds as they come


def snapshot(spec_round: SpecRound) -> dict[str, str]:
    """Every field, in a form that nothing changes later and in which NaN is NaN."""
    values = {spec.name: getattr(spec_round, spec.name) for spec in fields(spec_round)}
    return {name: repr(value.tolist() if isinstance(value, torch.Tensor) else value) for name, value in values.items()}


class RoundCollector:
    """Notes what a `spec_streamer` is given, as it is at that moment; raises at the round with the index `limit`."""

    def __init__(self, limit: int | None = None, events: list | None = None):
        self.limit = limit
        self.events = [] if events is None else events
        self.rounds: dict[int, list[SpecRound]] = defaultdict(list)  # by row
        self.snapshots: dict[int, list[dict[str, str]]] = defaultdict(list)
        self.ends = 0

    def put_round(self, row: int, spec_round: SpecRound) -> None:
        assert self.ends == 0
        self.events.append((row, spec_round.index))
        self.rounds[row].append(spec_round)
        self.snapshots[row].append(snapshot(spec_round))
        if spec_round.index == self.limit:
            raise ConnectionError("the client is gone")

    def end(self) -> None:
        self.ends += 1

    def tokens(self, row: int = 0) -> list[int]:
        return [token for spec_round in self.rounds[row] for token in spec_round.committed_token_ids]


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("record", ["ids", "full"])
@INPUTS
def test_streamed_rounds_are_those_of_the_states(inputs, record, sampled):
    model, reference, draft = trio()
    streamer = RoundCollector()
    options = GREEDY | dict(eos_token_id=early_end(reference, **inputs()))
    options |= dict(do_sample=True, temperature=0.3) if sampled else {}
    torch.manual_seed(0)
    out = model.generate(
        **inputs(), **options, assistant_model=draft, spec_config=TREE | dict(record=record), return_spec_states=True,
        spec_streamer=streamer, return_dict_in_generate=True, output_hidden_states=True,
    )  # fmt: skip
    assert out.spec_states.num_drafted
    assert sorted(streamer.snapshots) == list(range(len(out.spec_states)))
    for row, sequence in enumerate(out.spec_states):
        assert streamer.snapshots[row] == [snapshot(spec_round) for spec_round in sequence]
    indices = [index for _, index in streamer.events]
    assert indices == sorted(indices)
    assert streamer.ends == 1


@pytest.mark.parametrize("drafting", [dict(), dict(prompt_lookup_num_tokens=3)], ids=["nothing else", "prompt lookup"])
@INPUTS
def test_streaming_rounds_needs_no_states(inputs, drafting):
    model, reference, _ = trio()
    streamer = RoundCollector()
    out = model.generate(**inputs(), **GREEDY, **drafting, spec_streamer=streamer)
    assert isinstance(out, torch.Tensor)
    assert torch.equal(out, reference.generate(**inputs(), **GREEDY))
    assert [streamer.tokens(row) for row in range(len(out))] == out[:, inputs()["input_ids"].shape[1] :].tolist()
    assert streamer.ends == 1


def test_rounds_are_streamed_as_they_come():
    model, _, _ = trio()
    events: list = []
    model.register_forward_pre_hook(lambda *_: events.append("forward"))
    model.generate(prompt(), **GREEDY, prompt_lookup_num_tokens=3, spec_streamer=RoundCollector(events=events))
    assert len(events) > 8
    assert events == [event for index in range(len(events) // 2) for event in ("forward", (0, index))]


@pytest.mark.parametrize("shape", [STRICT, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("noise", [0.0, 0.1], ids=["in a long block", "among rejections"])
def test_a_stream_of_rounds_that_breaks_off(noise, shape):
    """The cache then holds what was delivered, all but its last token, as in plain decoding."""
    model, reference, _ = trio()
    options = dict(max_new_tokens=40, do_sample=False)
    undisturbed = reference.generate(prompt(), **options)
    cache, streamer = DynamicCache(config=reference.config), RoundCollector(limit=3)
    with pytest.raises(ConnectionError, match="the client is gone"):
        model.generate(
            prompt(), **options, assistant_model=noisy_copy(reference, noise), spec_config=shape | dict(max_nodes=4),
            spec_streamer=streamer, **{CACHE_NAME: cache},
        )  # fmt: skip
    assert [index for _, index in streamer.events] == [0, 1, 2, 3]
    delivered = torch.cat([prompt(), torch.tensor([streamer.tokens()])], dim=1)
    length = delivered.shape[1]
    assert torch.equal(delivered, undisturbed[:, :length])
    assert cache.get_seq_length() == length - 1
    left = options | dict(max_new_tokens=undisturbed.shape[1] - length)
    assert torch.equal(reference.generate(delivered, **{CACHE_NAME: cache}, **left), undisturbed)
    assert torch.equal(model.generate(prompt(), **options, spec_streamer=RoundCollector()), undisturbed)


@pytest.mark.parametrize("with_states", [False, True], ids=["no states", "states"])
@pytest.mark.parametrize(
    "by, inputs",
    [
        ("processor", lambda: dict(input_ids=prompt())),
        ("processor", padded),
        ("criterion", lambda: dict(input_ids=prompt())),
        ("criterion", padded),
        ("streamer", lambda: dict(input_ids=prompt())),
    ],
    ids=["processor", "processor, padded rows", "criterion", "criterion, padded rows", "streamer"],
)
def test_an_interruption_inside_of_a_walk_loses_no_token(by, inputs, with_states):
    model, reference, _ = trio()
    rounds, tokens = RoundCollector(), Collector(limit=14 if by == "streamer" else None)
    processor, criterion = RaisingProcessor(14), RaisingCriterion(14)
    options = GREEDY | dict(return_spec_states=with_states)
    if by == "processor":
        options["logits_processor"] = LogitsProcessorList([processor])
    elif by == "criterion":
        options["stopping_criteria"] = StoppingCriteriaList([criterion])
    with pytest.raises(ConnectionError if by == "streamer" else Interrupted):
        model.generate(
            **inputs(), **options, assistant_model=copy.deepcopy(reference), spec_config=STRICT, streamer=tokens,
            spec_streamer=rounds,
        )  # fmt: skip
    length = inputs()["input_ids"].shape[1]
    streamed = torch.tensor(tokens.puts[1:]).T.tolist()
    committed = [rounds.tokens(row) for row in range(len(inputs()["input_ids"]))]
    if by == "criterion":  # it is asked about a token that was not streamed yet
        assert committed == criterion.seen[:, length:].tolist()
        committed = [row[:-1] for row in committed]
    assert committed == streamed
    assert [len(row) for row in committed] == [14] * len(committed)
    assert committed == reference.generate(**inputs(), **GREEDY)[:, length : length + 14].tolist()
    for row in range(len(committed)):
        last = rounds.rounds[row][-1]
        assert (last.index, last.start) == (2, 10)  # 1 token, then 8 + 1, then a part of the next 8
        assert last.added_token_id is None and last.stop_reason is None
        assert len(last.token_ids) == 8 and last.accepted == list(range(5 if by == "criterion" else 4))
        assert len(last.target_token_ids) == 9 and len(last.target_logprobs) == 8


@pytest.mark.parametrize(
    "streamer", [object(), "print", print, Collector()], ids=["object", "name", "function", "other"]
)
def test_what_cannot_be_given_rounds(streamer):
    assert_refused(llama(), "`spec_streamer`", spec_streamer=streamer)
    assert_refused(llama(), "`spec_streamer`", spec_streamer=streamer, prompt_lookup_num_tokens=3)


# ---------------------------------------------------------------------- free when nobody asks

UNASKED = {
    "assistant": lambda draft: dict(assistant_model=draft),
    "prompt lookup": lambda draft: dict(prompt_lookup_num_tokens=3),
    "configuration": lambda draft: dict(spec_config=TREE | dict(record="full"), assistant_model=draft),
    "outputs": lambda draft: dict(
        assistant_model=draft, return_dict_in_generate=True, output_logits=True, output_hidden_states=True
    ),
}


@INPUTS
@pytest.mark.parametrize("asked", UNASKED.values(), ids=UNASKED)
def test_nothing_is_recorded_when_nobody_asks(asked, inputs, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("somebody records")

    monkeypatch.setattr("hf_specstate.recording.Recorder.__init__", refuse)
    model, reference, draft = trio()
    out = model.generate(**inputs(), **GREEDY, **asked(draft))
    sequences = out if isinstance(out, torch.Tensor) else out.sequences
    assert torch.equal(sequences, reference.generate(**inputs(), **GREEDY))
    for asking in (dict(return_spec_states=True), dict(spec_streamer=RoundCollector())):
        with pytest.raises(AssertionError, match="somebody records"):
            model.generate(**inputs(), **GREEDY, **asked(draft), **asking)
