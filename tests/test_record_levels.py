"""The record of a generation: how much is kept, what it cost, and that it is delivered whole, to who asked for it."""

import copy
import logging
import time
from collections import defaultdict
from dataclasses import fields

import pytest
import torch
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    StoppingCriteriaList,
)

from hf_specstate import SpecRound, SpecStates
from hf_specstate.compat import CACHE_NAME
from tests.families import VOCAB, noisy_copy, prompt
from tests.test_integrations import (
    Collector,
    Interrupted,
    RaisingCriterion,
    RaisingProcessor,
    early_end,
    padded,
    trio,
)
from tests.test_validation import assert_refused, llama

GREEDY = dict(max_new_tokens=24, do_sample=False)
STRICT = dict(strict=True)
TREE = dict(strict=True, tree_width=2)
INPUTS = pytest.mark.parametrize("inputs", [lambda: dict(input_ids=prompt()), padded], ids=["one row", "padded rows"])
TENSORS = ("top_token_ids", "top_logprobs", "logits", "hidden_states")


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
