"""The record of a generation: what it counts, against the text, and why rows ended."""

import math
from collections import Counter, defaultdict

import pytest
import torch
from transformers import (
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)

from hf_specstate import SpecRound, SpecSequence, SpecStates
from tests.families import prompt, tiny
from tests.test_integrations import (
    early_end,
    padded,
    spoken_trio,
    trio,
)

GREEDY = dict(max_new_tokens=24, do_sample=False)
STRICT = dict(strict=True)
TREE = dict(strict=True, tree_width=2)
INPUTS = pytest.mark.parametrize("inputs", [lambda: dict(input_ids=prompt()), padded], ids=["one row", "padded rows"])


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
