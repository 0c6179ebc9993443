"""Pipelines: the stock one carries sums, the registered one the full states."""

import pytest
import torch
from families import noisy_copy, tiny
from transformers import pipeline

import hf_specstate
from eval.random_model import byte_tokenizer
from hf_specstate.compat import CACHE_NAME

TEXTS = ["ab ab ab ab", "once upon a time, once upon"]
OPTIONS = dict(max_new_tokens=16, do_sample=False)
CHAT = [{"role": "user", "content": "hello hello"}]


@pytest.fixture
def parts():
    tokenizer = byte_tokenizer()
    model = tiny("llama", vocab_size=len(tokenizer))
    return model, noisy_copy(model), tokenizer


def states_of(model, draft, tokenizer, text: str, **options):
    """What a direct call records."""
    inputs = tokenizer(text, return_tensors="pt")
    hf_specstate.enable(model)
    options = OPTIONS | options
    return model.generate(**inputs, assistant_model=draft, return_spec_states=True, **options).spec_states


def told(states) -> list:
    return [[(r.index, r.token_ids, r.accepted, r.target_token_ids) for r in sequence] for sequence in states]


@pytest.mark.skipif(CACHE_NAME != "cache", reason="older pipelines cannot batch further outputs of any kind")
@pytest.mark.parametrize("batch_size", [1, 2])
def test_the_stock_pipeline_carries_the_sums(parts, batch_size):
    model, draft, tokenizer = parts
    pipe = pipeline("text-generation", model=hf_specstate.enable(model), tokenizer=tokenizer, assistant_model=draft)
    records = pipe(TEXTS, batch_size=batch_size, return_spec_states=True, **OPTIONS)
    for text, (record,) in zip(TEXTS, records, strict=True):
        (sequence,) = states_of(*parts, text)
        assert record["num_accepted_tokens"] == sequence.num_accepted > 0
        assert record["num_drafted_tokens"] == sequence.num_drafted > sequence.num_accepted
        assert record["num_target_forwards"] == len(sequence)


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("num_return_sequences", [1, 2])
def test_records_carry_the_states(parts, batch_size, num_return_sequences):
    model, draft, tokenizer = parts
    plain = pipeline("text-generation", model=model, tokenizer=tokenizer)(TEXTS, **OPTIONS)
    pipe = pipeline("speculative-text-generation", model=model, tokenizer=tokenizer, assistant_model=draft)
    assert hf_specstate.is_enabled(model)
    sampling = dict(do_sample=True, top_k=1)  # several greedy sequences are refused by transformers
    options = OPTIONS | sampling | dict(spec_config={"strict": True, "tree_width": 2})
    records = pipe(TEXTS, **options, num_return_sequences=num_return_sequences, batch_size=batch_size)
    for text, want, got in zip(TEXTS, plain, records, strict=True):
        assert len(got) == num_return_sequences
        for record in got:
            assert record["generated_text"] == want[0]["generated_text"]
            states = record["spec_states"]
            (sequence,) = states
            assert sequence.prompt_token_ids == tokenizer(text)["input_ids"]
            said = tokenizer.decode(sequence.token_ids, skip_special_tokens=True)
            assert record["generated_text"] == text + said
            assert told(states) == told(states_of(*parts, text, **options))


def test_one_prompt_a_chat_and_no_assistant(parts):
    model, _, tokenizer = parts
    pipe = pipeline("speculative-text-generation", model=model, tokenizer=tokenizer)
    (record,) = pipe(TEXTS[0], **OPTIONS)
    assert record["spec_states"].num_tokens == 16
    (record,) = pipe(CHAT, **OPTIONS)
    assert record["generated_text"][-1]["role"] == "assistant"
    assert record["generated_text"][-1]["content"] == tokenizer.decode(
        record["spec_states"][0].token_ids, skip_special_tokens=True
    )
    (one,), (two,) = pipe([CHAT, CHAT], batch_size=2, **OPTIONS)
    assert told(one["spec_states"]) == told(two["spec_states"]) == told(record["spec_states"])


def test_what_was_left_out_is_told(parts):
    model, draft, tokenizer = parts
    pipe = pipeline("speculative-text-generation", model=model, tokenizer=tokenizer, assistant_model=draft)
    options = OPTIONS | dict(spec_config={"record": "full", "record_max_bytes": 20_000, "strict": True})
    (record,) = pipe(TEXTS[0], **options)
    want = states_of(*parts, TEXTS[0], **options)
    assert record["spec_states"].num_left_out == want.num_left_out > 0
    kept = [[r.logits is not None for r in sequence] for sequence in (record["spec_states"][0], want[0])]
    assert kept[0] == kept[1] and any(kept[0])
    (record,) = pipe(TEXTS[0], **OPTIONS)
    assert record["spec_states"].num_left_out == 0


def test_a_spec_streamer_is_served_too(parts):
    model, draft, tokenizer = parts

    class Notes:
        rounds, ended = 0, 0

        def put_round(self, row, spec_round):
            self.rounds += 1

        def end(self):
            self.ended += 1

    notes = Notes()
    pipe = pipeline("speculative-text-generation", model=model, tokenizer=tokenizer, assistant_model=draft)
    (record,) = pipe(TEXTS[0], spec_streamer=notes, **OPTIONS)
    assert (notes.rounds, notes.ended) == (record["spec_states"].num_forwards, 1)
    assert torch.is_tensor(model.generate(torch.tensor([[1, 2]]), **OPTIONS))
