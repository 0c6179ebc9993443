"""Looking at a generation while it runs."""

import gc
import threading
import time

import pytest
import torch
from families import noisy_copy, prompt, tiny
from tokenizers import Tokenizer, decoders, models
from transformers import DynamicCache, LogitsProcessorList, PreTrainedTokenizerFast

import hf_specstate

VOCAB = 64
OPTIONS = dict(max_new_tokens=24, do_sample=False)
CONFIG = {"max_nodes": 4, "tree_width": 2, "strict": True}


@pytest.fixture
def model():
    return hf_specstate.enable(tiny("llama", vocab_size=VOCAB))


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A word for every token."""
    words = Tokenizer(models.WordLevel({f"word{place}": place for place in range(VOCAB)}, unk_token="word0"))
    words.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=words)


def drafting(model, **kwargs) -> dict:
    draft = noisy_copy(hf_specstate.disable(model))
    hf_specstate.enable(model)
    return OPTIONS | dict(assistant_model=draft, spec_config=CONFIG, return_spec_states=True) | kwargs


def batch() -> torch.Tensor:
    return torch.cat([prompt(seed=seed) for seed in (3, 4)])


@pytest.mark.parametrize("make_inputs", [prompt, batch])
def test_events_are_the_rounds_and_the_text(model, make_inputs):
    tokenizer, inputs, options = word_tokenizer(), make_inputs(), drafting(model)
    want = model.generate(inputs, **options)
    events = hf_specstate.stream(model, inputs, tokenizer=tokenizer, **options)
    seen = list(events)
    assert torch.equal(events.output.sequences, want.sequences)
    for row, sequence in enumerate(want.spec_states):
        rounds = [event.round for event in seen if event.row == row]
        assert [(r.index, r.token_ids, r.accepted, r.target_token_ids) for r in rounds] == [
            (r.index, r.token_ids, r.accepted, r.target_token_ids) for r in sequence
        ]
        text = "".join(event.text for event in seen if event.row == row)
        assert text == tokenizer.decode(sequence.token_ids, skip_special_tokens=True)
    assert [event.round.index for event in seen] == sorted(event.round.index for event in seen)


def test_rounds_come_while_the_generation_goes_on(model):
    def slow(*_):
        time.sleep(0.01)

    model.register_forward_pre_hook(slow)
    events = hf_specstate.stream(model, prompt(), **drafting(model))
    first = next(events)
    assert first.text is None and first.round.index == 0 and events.output is None
    assert len(list(events)) > 3 and events.output is not None


def test_an_error_comes_after_every_round_before_it(model):
    delivered = []

    class Breaks:
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] == prompt().shape[1] + 9:
                raise RuntimeError("in the middle")
            return scores

    class Notes:
        def put(self, value):
            delivered.extend(value.reshape(-1).tolist())

        def end(self):
            raise AssertionError

    events = hf_specstate.stream(
        model, prompt(), logits_processor=LogitsProcessorList([Breaks()]), streamer=Notes(), **drafting(model)
    )
    tokens = []
    with pytest.raises(RuntimeError, match="in the middle"):
        for event in events:
            tokens += event.round.committed_token_ids
    assert tokens == delivered[prompt().shape[1] :] and len(tokens) == 9
    with pytest.raises(StopIteration):
        next(events)


def test_two_readers_both_come_to_the_end(model):
    events, seen = hf_specstate.stream(model, prompt(), **drafting(model)), []
    readers = [threading.Thread(target=lambda: seen.extend(events), daemon=True) for _ in range(2)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(20)
        assert not reader.is_alive()
    assert len(seen) == events.output.spec_states.num_forwards


def test_bad_arguments_are_raised_by_the_iterator(model):
    with pytest.raises(ValueError, match="enable"):
        hf_specstate.stream(tiny("llama"), prompt())
    with pytest.raises(ValueError, match="max_nodes"):
        list(hf_specstate.stream(model, prompt(), spec_config={"max_nodes": -1}))


@pytest.mark.parametrize("leave", ["close", "with", "forget"])
def test_leaving_early_ends_the_generation_and_keeps_the_cache(model, leave):
    def slow(*_):
        time.sleep(0.005)

    hook = model.register_forward_pre_hook(slow)
    cache, options = DynamicCache(config=model.config), drafting(model, max_new_tokens=400)
    before = threading.active_count()
    events = hf_specstate.stream(model, prompt(), past_key_values=cache, **options)
    tokens = []
    if leave == "with":
        with events:
            tokens += next(events).round.committed_token_ids
            tokens += next(events).round.committed_token_ids
    else:
        tokens += next(events).round.committed_token_ids
        events.close() if leave == "close" else None
        assert leave == "forget" or list(events) == []
    del events
    gc.collect()
    deadline = time.monotonic() + 20
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before
    hook.remove()
    # the cache holds a prefix of the plain text without its last token: going on from there gives the rest
    length = cache.get_seq_length()
    plain = hf_specstate.disable(model).generate(prompt(), max_new_tokens=60, do_sample=False)
    assert prompt().shape[1] <= length < 300
    again = model.generate(plain[:, : length + 1], past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert torch.equal(again, plain[:, : length + 5]) or length + 5 > plain.shape[1]
