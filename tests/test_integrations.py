"""Everything around the decoding loop: pipelines, inputs, caches, streamers, outputs, tokenizers, interruptions."""

import copy
import logging
import string
from threading import Thread

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    WhisperConfig,
    WhisperForConditionalGeneration,
    pipeline,
)

from hf_specstate import Drafter, DraftHistory, TokenTree, enable
from hf_specstate.compat import CACHE_NAME
from tests.families import VOCAB, noisy_copy, prompt, tiny

GREEDY = dict(max_new_tokens=24, do_sample=False)
CHAIN = dict(strict=True)
TREE = dict(strict=True, tree_width=2)
SHAPES = pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])


def trio(family: str = "llama", **overrides):
    """An enabled model, the same weights never enabled, and a draft that agrees with them now and then."""
    reference = tiny(family, **overrides)
    return enable(copy.deepcopy(reference)), reference, noisy_copy(reference)


def padded(lengths=(5, 8, 3)) -> dict[str, torch.Tensor]:
    """A left-padded batch of prompts."""
    longest = max(lengths)
    rows = [prompt(length, seed=seed) for seed, length in enumerate(lengths)]
    ids = torch.cat([torch.nn.functional.pad(row, (longest - row.shape[1], 0)) for row in rows])
    return dict(input_ids=ids, attention_mask=(ids != 0).long())


def char_tokenizer(characters: str = string.ascii_letters + " .,!?") -> PreTrainedTokenizerFast:
    """One token a character, 4 special ones, at most `VOCAB` in all."""
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<s>", "</s>", "<unk>", *characters])}
    assert len(vocabulary) <= VOCAB
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        padding_side="left", clean_up_tokenization_spaces=False,
        chat_template="{% for m in messages %}{{ m.role }}, {{ m.content }}!{% endfor %}",
    )  # fmt: skip


def spoken_trio(eos_token_id: int | None = None):
    """[`trio`] with a tokenizer whose every token is a character."""
    tokenizer = char_tokenizer()
    return *trio("llama", vocab_size=len(tokenizer), eos_token_id=eos_token_id), tokenizer


def early_end(reference, row: int = 0, place: int = 6, **inputs) -> int:
    """A token that `reference` generates in `row` after `place` others: as EOS it ends that row early."""
    length = inputs["input_ids"].shape[1]
    return int(reference.generate(**inputs, **GREEDY)[row, length + place])


def assert_used(output) -> None:
    """Drafts were verified, some accepted and some rejected: the test has tested something."""
    drafted = sum(sequence.num_drafted for sequence in output.spec_states)
    accepted = sum(sequence.num_accepted for sequence in output.spec_states)
    assert 0 < accepted < drafted


# ---------------------------------------------------------------------- pipelines

CHAT = [dict(role="user", content="hello"), dict(role="assistant", content="hi"), dict(role="user", content="why?")]


@SHAPES
@pytest.mark.parametrize(
    "texts, options",
    [
        ("hello", dict()),
        (["hello", "good day", "so"], dict()),
        (["hello", "good day", "so"], dict(batch_size=2)),
        (["hello", "good day"], dict(batch_size=2, return_full_text=False)),
        (CHAT, dict()),
        ([CHAT, CHAT[:1]], dict(batch_size=2)),
        (["hello"], dict(return_tensors=True)),
    ],
    ids=["one", "list", "batches", "new text", "chat", "chats", "tensors"],
)
def test_text_generation_pipeline(texts, options, shape):
    model, reference, draft, tokenizer = spoken_trio()
    eos = early_end(reference, **tokenizer("hello", return_tensors="pt", return_token_type_ids=False))
    options = GREEDY | dict(eos_token_id=eos) | options
    want = pipeline("text-generation", model=reference, tokenizer=tokenizer)(texts, **options)
    speculative = pipeline("text-generation", model=model, tokenizer=tokenizer, assistant_model=draft)
    assert speculative(texts, spec_config=shape, **options) == want
    if CACHE_NAME == "cache" or "batch_size" not in options:  # older pipelines cannot batch further outputs of any kind
        got = speculative(texts, spec_config=shape, return_spec_states=True, **options)
        assert without_sums(got) == want


def without_sums(records):
    if isinstance(records, list):
        return [without_sums(record) for record in records]
    return {name: value for name, value in records.items() if not name.startswith("num_")}


def test_pipeline_with_several_sequences_per_prompt():
    model, reference, draft, tokenizer = spoken_trio()
    options = dict(do_sample=True, num_return_sequences=2, max_new_tokens=12)
    torch.manual_seed(0)
    want = pipeline("text-generation", model=reference, tokenizer=tokenizer)(["hello"], **options)
    torch.manual_seed(0)
    speculative = pipeline("text-generation", model=model, tokenizer=tokenizer, assistant_model=draft)
    assert speculative(["hello"], spec_config=dict(lockstep=True, strict=True), **options) == want
    free = speculative(["hello", "good day"], spec_config=CHAIN, batch_size=2, **options)
    assert [len(results) for results in free] == [2, 2]
    assert free[0][0] != free[0][1]


# ---------------------------------------------------------------------- inputs


@SHAPES
@pytest.mark.parametrize("inputs", [lambda: dict(input_ids=prompt()), padded], ids=["one row", "padded rows"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral_sliding", "gemma3"])
def test_inputs_embeds(family, inputs, shape):
    model, reference, draft = trio(family)
    inputs = inputs()
    with torch.no_grad():
        embeds = reference.get_input_embeddings()(inputs["input_ids"]) + 0.1
    mask = {"attention_mask": inputs["attention_mask"]} if "attention_mask" in inputs else {}
    for with_ids in (dict(), dict(input_ids=inputs["input_ids"])):
        want = reference.generate(inputs_embeds=embeds, **with_ids, **mask, **GREEDY)
        out = model.generate(
            inputs_embeds=embeds, **with_ids, **mask, assistant_model=draft, return_spec_states=True, spec_config=shape,
            **GREEDY,
        )  # fmt: skip
        assert torch.equal(out.sequences, want)
        assert any(sequence.num_drafted for sequence in out.spec_states)


def test_several_return_sequences():
    model, reference, draft = trio()
    sampling = dict(do_sample=True, num_return_sequences=3, max_new_tokens=16)
    for inputs in (dict(input_ids=prompt()), padded()):
        torch.manual_seed(0)
        want = reference.generate(**inputs, **sampling)
        torch.manual_seed(0)
        out = model.generate(
            **inputs, **sampling, assistant_model=draft, return_spec_states=True,
            spec_config=dict(lockstep=True, strict=True),
        )  # fmt: skip
        assert torch.equal(out.sequences, want)
        assert len(out.spec_states) == len(want)
        certain = model.generate(**inputs, **sampling, top_k=1, assistant_model=draft, spec_config=CHAIN)
        assert torch.equal(certain, reference.generate(**inputs, **sampling, top_k=1))


@SHAPES
@pytest.mark.parametrize("family", ["llama", "gemma3", "bloom", "bart", "t5"])
def test_greedy_batches(family, shape):
    model, reference, draft = trio(family)
    inputs = padded()
    if reference.config.is_encoder_decoder:
        eos = int(reference.generate(**inputs, **GREEDY)[0, 8])
    else:
        eos = early_end(reference, **inputs)
    options = GREEDY | dict(eos_token_id=eos)
    out = model.generate(**inputs, assistant_model=draft, return_spec_states=True, spec_config=shape, **options)
    assert torch.equal(out.sequences, reference.generate(**inputs, **options))
    assert len(out.spec_states) == 3
    assert sum(sequence.num_accepted for sequence in out.spec_states)


@SHAPES
@pytest.mark.parametrize("chunk", [1, 3, 8, 100])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_chunked_prefill(family, chunk, shape):
    model, reference, draft = trio(family)
    widths = []
    handle = model.register_forward_pre_hook(
        lambda _, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    for inputs in (dict(input_ids=prompt(11)), padded()):
        widths.clear()
        out = model.generate(
            **inputs, assistant_model=draft, prefill_chunk_size=chunk, spec_config=shape, return_spec_states=True,
            **GREEDY,
        )  # fmt: skip
        assert torch.equal(out.sequences, reference.generate(**inputs, **GREEDY))
        length = inputs["input_ids"].shape[1]
        chunks = -(-length // chunk)
        assert sum(widths[:chunks]) == length and max(widths[:chunks]) <= chunk
    handle.remove()


# ---------------------------------------------------------------------- caches

WAYS = pytest.mark.parametrize("way", ["assistant", "tree", "prompt lookup", "early exit"])


def drafting(way: str, draft) -> dict:
    return {
        "assistant": dict(assistant_model=draft, spec_config=CHAIN),
        "tree": dict(assistant_model=draft, spec_config=TREE),
        "prompt lookup": dict(prompt_lookup_num_tokens=4, spec_config=CHAIN),
        "early exit": dict(assistant_early_exit=1, spec_config=CHAIN),
    }[way]


@WAYS
@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral_sliding"])
@pytest.mark.parametrize("inputs", [lambda: dict(input_ids=prompt()), padded], ids=["one row", "padded rows"])
def test_continuing_from_the_users_cache(family, inputs, way):
    model, reference, draft = trio(family)
    inputs, options = inputs(), drafting(way, draft)
    cache = DynamicCache(config=reference.config)
    first = model.generate(**inputs, **{CACHE_NAME: cache}, **options, **GREEDY)
    assert torch.equal(first, reference.generate(**inputs, **GREEDY))
    assert cache.get_seq_length() == first.shape[1] - 1

    news = prompt(5, seed=9).expand(len(first), -1)
    longer = torch.cat([first, news], dim=1)
    mask = torch.nn.functional.pad(inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])), (0, 29), value=1)
    want = reference.generate(longer, attention_mask=mask, **GREEDY)
    whole, only_new = cache, copy.deepcopy(cache)
    second = model.generate(longer, attention_mask=mask, **{CACHE_NAME: whole}, **options, **GREEDY)
    assert torch.equal(second, want)
    assert whole.get_seq_length() == second.shape[1] - 1

    # only the tokens that the cache lacks, under a mask for all of them
    fresh = longer[:, only_new.get_seq_length() :]
    third = model.generate(fresh, attention_mask=mask, **{CACHE_NAME: only_new}, **options, **GREEDY)
    assert torch.equal(third[:, fresh.shape[1] :], want[:, longer.shape[1] :])


@WAYS
@pytest.mark.parametrize("family", ["gemma3", "mistral_sliding"])
def test_sliding_caches_go_back_to_normal(family, way):
    model, reference, draft = trio(family)
    cache = DynamicCache(config=reference.config)
    first = model.generate(prompt(), **{CACHE_NAME: cache}, **drafting(way, draft), **GREEDY)
    longer = torch.cat([first, prompt(5, seed=9)], dim=1)
    plain = reference.generate(longer, **{CACHE_NAME: cache}, **GREEDY)
    assert torch.equal(plain, reference.generate(longer, **GREEDY))
    sliding = next(layer for layer in cache.layers if layer.is_sliding)
    assert sliding.keys.shape[-2] < reference.config.sliding_window  # it forgets again


def test_the_returned_cache_can_be_used():
    model, reference, draft = trio()
    for inputs in (dict(input_ids=prompt()), padded()):
        out = model.generate(**inputs, assistant_model=draft, return_spec_states=True, spec_config=CHAIN, **GREEDY)
        want = reference.generate(**inputs, return_dict_in_generate=True, **GREEDY)
        got = out[CACHE_NAME]
        assert type(got) is DynamicCache
        assert got.get_seq_length() == want[CACHE_NAME].get_seq_length() == out.sequences.shape[1] - 1
        for layer, expected in zip(got.layers, want[CACHE_NAME].layers, strict=True):
            torch.testing.assert_close(layer.keys, expected.keys, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(layer.values, expected.values, atol=1e-4, rtol=1e-4)


@WAYS
@pytest.mark.parametrize("inputs", [lambda: dict(input_ids=prompt()), padded], ids=["one row", "padded rows"])
def test_static_cache(inputs, way):
    model, reference, draft = trio()
    inputs = inputs()
    want = reference.generate(**inputs, cache_implementation="static", **GREEDY)
    out = model.generate(
        **inputs, cache_implementation="static", return_spec_states=True, **drafting(way, draft), **GREEDY
    )
    assert torch.equal(out.sequences, want)
    assert torch.equal(want, reference.generate(**inputs, **GREEDY))
    assert any(sequence.num_drafted for sequence in out.spec_states)


@SHAPES
@pytest.mark.parametrize("inputs", [lambda: dict(input_ids=prompt()), padded], ids=["one row", "padded rows"])
def test_a_static_cache_without_a_slot_to_spare(inputs, shape):
    model, reference, _ = trio()
    inputs = inputs()
    slots = inputs["input_ids"].shape[1] + GREEDY["max_new_tokens"] - 1
    cache = StaticCache(config=reference.config, max_cache_len=slots)
    out = model.generate(**inputs, **{CACHE_NAME: cache}, assistant_model=reference, spec_config=shape, **GREEDY)
    assert torch.equal(out, reference.generate(**inputs, **GREEDY))
    assert int(cache.get_seq_length()) == slots


# ---------------------------------------------------------------------- streamers


class Collector:
    """Notes what a streamer is given; raises after `limit` new tokens."""

    def __init__(self, limit: int | None = None):
        self.puts: list[list] = []
        self.ends = 0
        self.limit = limit

    def put(self, value):
        assert self.ends == 0
        self.puts.append(value.tolist())
        if self.limit is not None and len(self.puts) > self.limit:
            raise ConnectionError("the client is gone")

    def end(self):
        self.ends += 1


@SHAPES
@pytest.mark.parametrize("inputs", [lambda: dict(input_ids=prompt()), padded], ids=["one row", "padded rows"])
def test_streamers(inputs, shape):
    model, reference, draft = trio()
    inputs = inputs()
    options = GREEDY | dict(eos_token_id=early_end(reference, **inputs))
    want, got = Collector(), Collector()
    reference.generate(**inputs, streamer=want, **options)
    model.generate(**inputs, streamer=got, assistant_model=draft, spec_config=shape, **options)
    assert got.puts == want.puts
    assert got.ends == 1


def test_tokens_are_streamed_as_they_come():
    model, _, draft = trio()
    events = []
    model.register_forward_pre_hook(lambda *_: events.append("forward"))

    class Streamer(Collector):
        def put(self, value):
            events.append("token")

    model.generate(prompt(), streamer=Streamer(), assistant_model=draft, spec_config=CHAIN, **GREEDY)
    assert events[:4] == ["token", "forward", "token", "forward"]  # the prompt, and one token after the prefill
    assert events[-1] == "token" and events.count("token") == 25


def test_text_iterator_streamer():
    model, reference, draft, tokenizer = spoken_trio()
    inputs = tokenizer("hello", return_tensors="pt", return_token_type_ids=False)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    arguments = dict(**inputs, streamer=streamer, assistant_model=draft, spec_config=CHAIN, **GREEDY)
    thread = Thread(target=model.generate, kwargs=arguments)
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == tokenizer.decode(reference.generate(**inputs, **GREEDY)[0, 5:])


# ---------------------------------------------------------------------- stopping


@SHAPES
def test_stop_strings(shape):
    model, reference, draft, tokenizer = spoken_trio()
    for texts in (["hello"], ["hello", "good day"]):
        inputs = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
        length = inputs["input_ids"].shape[1]
        free = tokenizer.decode(reference.generate(**inputs, **GREEDY)[0, length:])
        options = GREEDY | dict(stop_strings=[free[5:7]], tokenizer=tokenizer)
        want = reference.generate(**inputs, **options)
        assert len(texts) > 1 or want.shape[1] <= length + 7
        out = model.generate(**inputs, assistant_model=draft, spec_config=shape, **options)
        assert torch.equal(out, want)


@pytest.mark.parametrize("inputs", [lambda: dict(input_ids=prompt()), padded], ids=["one row", "padded rows"])
def test_max_time(inputs):
    model, reference, draft = trio()
    inputs = inputs()
    length = inputs["input_ids"].shape[1]
    options = dict(assistant_model=draft, spec_config=CHAIN) | GREEDY
    assert torch.equal(model.generate(**inputs, max_time=600.0, **options), reference.generate(**inputs, **GREEDY))
    assert model.generate(**inputs, max_time=1e-9, **options).shape[1] == length + 1


# ---------------------------------------------------------------------- encoder-decoder models


def tiny_whisper(seed: int = 0) -> WhisperForConditionalGeneration:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = WhisperConfig(
            vocab_size=VOCAB, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8, max_source_positions=30,
            max_target_positions=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
            suppress_tokens=None, begin_suppress_tokens=None, init_std=0.3,
        )  # fmt: skip
        model = WhisperForConditionalGeneration(config).eval()
    for name in ("suppress_tokens", "begin_suppress_tokens", "forced_decoder_ids"):
        setattr(model.generation_config, name, None)
    return model


def encoder_decoder(family: str):
    """A trio and the inputs of two rows."""
    if family != "whisper":
        return *trio(family), padded((7, 7))
    reference = tiny_whisper()
    features = torch.randn(2, 8, 60, generator=torch.Generator().manual_seed(0))
    return enable(copy.deepcopy(reference)), reference, noisy_copy(reference), dict(input_features=features)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("way", ["assistant", "tree", "prompt lookup"])
@pytest.mark.parametrize("family", ["t5", "bart", "whisper"])
def test_encoder_decoder_models(family, way, rows):
    model, reference, draft, inputs = encoder_decoder(family)
    inputs = {name: value[:rows] for name, value in inputs.items()}
    want = reference.generate(**inputs, **GREEDY)
    assert want.shape[1] > 8
    assert torch.equal(model.generate(**inputs, **drafting(way, draft), **GREEDY), want)
    calls = []
    handle = model.get_decoder().register_forward_hook(lambda *_: calls.append(1))
    model.generate(**inputs, **(drafting(way, copy.deepcopy(reference)) if way != "prompt lookup" else {}), **GREEDY)
    handle.remove()
    assert way == "prompt lookup" or len(calls) <= 5  # a perfect draft saves most of the 24 forwards


def test_whisper_returns_states():
    model, reference, draft, inputs = encoder_decoder("whisper")
    out = model.generate(**inputs, assistant_model=draft, return_spec_states=True, spec_config=TREE, **GREEDY)
    want = reference.generate(**inputs, return_dict_in_generate=True, **GREEDY)
    assert torch.equal(out.sequences, want.sequences)
    assert len(out.spec_states) == 2
    assert_used(out)


def test_whisper_takes_one_history():
    model, reference, _, inputs = encoder_decoder("whisper")
    with pytest.raises(ValueError, match="one `draft_history` for all"):
        model.generate(**inputs, draft_history=[DraftHistory(), DraftHistory()], **GREEDY)
    history = DraftHistory()
    assert torch.equal(
        model.generate(**inputs, draft_history=history, **GREEDY), reference.generate(**inputs, **GREEDY)
    )
    assert len(history)


def test_whisper_keeps_begin_suppress_tokens_with_an_assistant():
    model, reference, draft, inputs = encoder_decoder("whisper")
    first = reference.generate(**inputs, **GREEDY)[:, 0].tolist()
    for whisper in (model, reference, draft):
        whisper.generation_config.begin_suppress_tokens = first
    want = reference.generate(**inputs, **GREEDY)
    assert want[0, 0] not in first
    assert torch.equal(model.generate(**inputs, assistant_model=draft, spec_config=CHAIN, **GREEDY), want)
    assert torch.equal(model.generate(**inputs, assistant_model=draft, **GREEDY), want)


def test_whisper_on_long_audio():
    model, reference, draft, _ = encoder_decoder("whisper")
    for whisper in (model, reference, draft):
        whisper.generation_config.no_timestamps_token_id = 40  # what is above it is a time
    inputs = dict(
        input_features=torch.randn(2, 8, 170, generator=torch.Generator().manual_seed(0)),
        attention_mask=torch.ones(2, 170, dtype=torch.long), return_timestamps=True, return_segments=True,
    )  # fmt: skip
    want = reference.generate(**inputs, **GREEDY)
    out = model.generate(**inputs, assistant_model=draft, return_spec_states=True, spec_config=CHAIN, **GREEDY)
    assert torch.equal(out["sequences"], want["sequences"])
    assert [len(segments) for segments in out["segments"]] == [len(segments) for segments in want["segments"]]
    assert len(out["segments"][0]) > 1
    assert all(segment["result"]["spec_states"].num_drafted for segments in out["segments"] for segment in segments)


# ---------------------------------------------------------------------- two tokenizers, early exit


def translated(reference, ours: PreTrainedTokenizerFast, theirs: PreTrainedTokenizerFast):
    """A draft that says what `reference` says, in the tokens of `theirs`."""
    draft = copy.deepcopy(reference)
    vocabulary, place = ours.get_vocab(), theirs.get_vocab()
    with torch.no_grad():
        for matrix in (draft.get_input_embeddings().weight, draft.get_output_embeddings().weight):
            rows = matrix.clone()
            for token, number in vocabulary.items():
                matrix[place[token]] = rows[number]
    return noisy_copy(draft, noise=0.02)


@pytest.mark.parametrize(
    "texts, sampling",
    [(["hello"], dict()), (["hello", "good day"], dict()), (["hello"], dict(do_sample=True, temperature=0.2))],
    ids=["greedy", "greedy rows", "sampled"],
)
def test_two_tokenizers(texts, sampling):
    model, reference, _, tokenizer = spoken_trio()
    other = char_tokenizer(" .,!?" + string.ascii_letters[::-1])
    inputs = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
    options = GREEDY | dict(suppress_tokens=[0, 1, 2, 3]) | sampling  # special tokens have no text to translate
    torch.manual_seed(0)
    want = reference.generate(**inputs, **options)
    for _ in range(2):  # a second draft with the same tokenizers is another draft
        draft = translated(reference, tokenizer, other)
        before = copy.deepcopy(draft.state_dict())
        torch.manual_seed(0)
        out = model.generate(
            **inputs, assistant_model=draft, tokenizer=tokenizer, assistant_tokenizer=other, return_spec_states=True,
            spec_config=CHAIN, **options,
        )  # fmt: skip
        assert torch.equal(out.sequences, want)
        assert_used(out)
        # nobody set a threshold, so that unsure drafts go on
        assert max(len(spec_round.token_ids) for spec_round in out.spec_states[0]) > 3
        after = draft.state_dict()
        assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "bloom"])
@pytest.mark.parametrize("inputs", [lambda: dict(input_ids=prompt()), padded], ids=["one row", "padded rows"])
def test_early_exit(family, inputs):
    model, reference, _ = trio(family)
    inputs = inputs()
    seen = set()

    class Spy(LogitsProcessor):
        def __call__(self, input_ids, scores):
            seen.add(model.config.num_hidden_layers)
            return scores

    for processors in (LogitsProcessorList(), LogitsProcessorList([Spy()])):
        out = model.generate(
            **inputs, assistant_early_exit=1, logits_processor=processors, return_spec_states=True, spec_config=CHAIN,
            **GREEDY,
        )  # fmt: skip
        assert torch.equal(out.sequences, reference.generate(**inputs, **GREEDY))
        assert any(sequence.num_drafted for sequence in out.spec_states)
    assert seen == {2}  # the model is whole while its first layer drafts


# ---------------------------------------------------------------------- scores, logits, hidden states, attentions

OUTPUTS = ("scores", "logits", "hidden_states", "attentions", "decoder_hidden_states", "decoder_attentions")
OUTPUTS += ("cross_attentions", "encoder_hidden_states", "encoder_attentions")
EVERYTHING = dict(output_scores=True, output_logits=True, output_hidden_states=True, output_attentions=True)
EVERYTHING |= dict(return_dict_in_generate=True)


def assert_same(got, want, lengths: list[int], path: str) -> None:
    """Nested tuples of tensors, one a step first: equal up to a row's end, zeros after it."""
    assert isinstance(got, tuple) and len(got) == len(want), path
    for step, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        mine, theirs = (value if isinstance(value, tuple) else (value,) for value in (mine, theirs))
        assert len(mine) == len(theirs), f"{path}[{step}]"
        for ours, expected in zip(mine, theirs, strict=True):
            assert ours.shape == expected.shape and ours.dtype == expected.dtype, f"{path}[{step}]"
            running = torch.tensor([step < length for length in lengths])
            torch.testing.assert_close(
                ours[running], expected[running], atol=1e-4, rtol=1e-4, msg=lambda text, s=step: f"{path}[{s}]: {text}"
            )
            assert not ours[~running].any(), f"{path}[{step}]"


@SHAPES
@pytest.mark.parametrize("inputs", [lambda: dict(input_ids=prompt(11)), padded], ids=["one row", "padded rows"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "bart"])
def test_outputs_along_the_text(family, inputs, shape):
    model, reference, draft = trio(family, attn_implementation="eager")
    inputs = inputs()
    start = 1 if reference.config.is_encoder_decoder else inputs["input_ids"].shape[1]
    eos = int(reference.generate(**inputs, **GREEDY)[0, start + 6])
    options = GREEDY | EVERYTHING | dict(eos_token_id=eos, repetition_penalty=1.1)
    want = reference.generate(**inputs, **options)
    got = model.generate(**inputs, assistant_model=draft, return_spec_states=True, spec_config=shape, **options)
    assert torch.equal(got.sequences, want.sequences)
    new = want.sequences[:, start:]
    lengths = [int((row == eos).nonzero()[0]) + 1 if eos in row else len(row) for row in new]
    assert len(lengths) == 1 or min(lengths) < max(lengths)
    compared = [name for name in OUTPUTS if want.get(name) is not None]
    assert len(compared) == (7 if family == "bart" else 4)
    for name in compared:
        rows = lengths if not name.startswith("encoder") else [999] * len(lengths)
        assert_same(got[name], want[name], rows, name)
    assert {name for name in OUTPUTS if got.get(name) is not None} == set(compared)


# ---------------------------------------------------------------------- interruptions


class Interrupted(Exception):
    pass


class RaisingProcessor(LogitsProcessor):
    def __init__(self, calls: int):
        self.calls = calls
        self.seen: torch.Tensor | None = None

    def __call__(self, input_ids, scores):
        self.seen, self.calls = input_ids.clone(), self.calls - 1
        if self.calls < 0:
            raise Interrupted
        return scores


class RaisingCriterion(StoppingCriteria):
    def __init__(self, calls: int):
        self.calls = calls
        self.seen: torch.Tensor | None = None

    def __call__(self, input_ids, scores, **kwargs):
        self.seen, self.calls = input_ids.clone(), self.calls - 1
        if self.calls < 0:
            raise Interrupted
        return torch.zeros(len(input_ids), dtype=torch.bool)


def interrupt(by: str, model, cache, draft, shape) -> torch.Tensor:
    """Runs a call that is interrupted in the middle, and returns the sequence as far as it was delivered."""
    streamer, processor, criterion = Collector(), RaisingProcessor(14), RaisingCriterion(14)
    options = dict(assistant_model=draft, spec_config=shape, **{CACHE_NAME: cache}, **GREEDY)
    if by == "streamer":
        streamer = Collector(limit=15)
        with pytest.raises(ConnectionError):
            model.generate(prompt(), streamer=streamer, **options)
        return torch.tensor([streamer.puts[0][0] + [token for (token,) in streamer.puts[1:]]])
    if by == "processor":
        with pytest.raises(Interrupted):
            model.generate(prompt(), logits_processor=LogitsProcessorList([processor]), **options)
        return processor.seen
    if by == "criterion":
        with pytest.raises(Interrupted):
            model.generate(prompt(), stopping_criteria=StoppingCriteriaList([criterion]), **options)
        return criterion.seen
    calls = []

    def between_two_layers(*_):
        calls.append(1)
        if len(calls) == 4:  # the prefill and two rounds have passed
            raise KeyboardInterrupt

    handle = model.model.layers[1].register_forward_pre_hook(between_two_layers)
    with pytest.raises(KeyboardInterrupt):
        model.generate(prompt(), streamer=streamer, **options)
    handle.remove()
    return torch.tensor([streamer.puts[0][0] + [token for (token,) in streamer.puts[1:]]])


@SHAPES
@pytest.mark.parametrize("by", ["streamer", "processor", "criterion", "keyboard"])
@pytest.mark.parametrize("kind", ["dynamic", "sliding", "static"])
@pytest.mark.parametrize("noise", [0.0, 0.1], ids=["in a long block", "among rejections"])
def test_interrupted_calls_leave_everything_usable(kind, by, shape, noise):
    model, reference, _ = trio("gemma3" if kind == "sliding" else "llama")
    draft = noisy_copy(reference, noise)
    if kind == "static":
        cache = StaticCache(config=reference.config, max_cache_len=64)
    else:
        cache = DynamicCache(config=reference.config)
    delivered = interrupt(by, model, cache, draft, shape)
    undisturbed = reference.generate(prompt(), **GREEDY)
    length = delivered.shape[1]
    assert prompt().shape[1] < length < undisturbed.shape[1]
    assert torch.equal(delivered, undisturbed[:, :length])
    assert int(cache.get_seq_length()) == length - 1

    left = GREEDY | dict(max_new_tokens=undisturbed.shape[1] - length)
    assert torch.equal(reference.generate(delivered, **{CACHE_NAME: cache}, **left), undisturbed)
    assert torch.equal(model.generate(prompt(), **GREEDY), undisturbed)
    again = model.generate(prompt(), assistant_model=draft, spec_config=shape, **GREEDY)
    assert torch.equal(again, undisturbed)
    assert torch.equal(draft.generate(prompt(), **GREEDY), noisy_copy(reference, noise).generate(prompt(), **GREEDY))


@SHAPES
def test_an_interrupted_batch_goes_back_to_what_was_streamed(shape):
    model, reference, draft = trio()
    inputs, cache, streamer = padded(), DynamicCache(config=reference.config), Collector(limit=12)
    with pytest.raises(ConnectionError):
        model.generate(
            **inputs, assistant_model=draft, spec_config=shape, streamer=streamer, **{CACHE_NAME: cache}, **GREEDY
        )
    prompts, *tokens = streamer.puts
    delivered = torch.cat([torch.tensor(prompts), torch.tensor(tokens).T], dim=1)
    undisturbed = reference.generate(**inputs, **GREEDY)
    assert torch.equal(delivered, undisturbed[:, : delivered.shape[1]])
    assert cache.get_seq_length() == delivered.shape[1] - 1
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, len(tokens)), value=1)
    left = GREEDY | dict(max_new_tokens=24 - len(tokens))
    rest = reference.generate(delivered, attention_mask=mask, **{CACHE_NAME: cache}, **left)
    assert torch.equal(rest, undisturbed)


@pytest.mark.parametrize("filled, chunk", [(False, None), (True, None), (False, 4)], ids=["fresh", "filled", "chunks"])
@pytest.mark.parametrize("kind", ["dynamic", "sliding", "static", "without a config"])
def test_an_interrupted_prefill_leaves_the_cache_as_it_was(kind, filled, chunk):
    model, reference, draft = trio("gemma3" if kind == "sliding" else "llama")
    if kind == "static":
        cache = StaticCache(config=reference.config, max_cache_len=80)
    else:
        cache = DynamicCache() if kind == "without a config" else DynamicCache(config=reference.config)
    options = dict(assistant_model=draft, spec_config=CHAIN, prefill_chunk_size=chunk, **{CACHE_NAME: cache}, **GREEDY)
    ids = torch.cat([model.generate(prompt(), **options), prompt(6, seed=9)], dim=1) if filled else prompt()
    length = int(cache.get_seq_length())
    calls = []

    def between_two_layers(*_):
        calls.append(1)
        if len(calls) == (1 if chunk is None else 2):
            raise KeyboardInterrupt

    handle = model.model.layers[1].register_forward_pre_hook(between_two_layers)
    with pytest.raises(KeyboardInterrupt):
        model.generate(ids, **options)
    handle.remove()
    assert int(cache.get_seq_length()) == length
    assert torch.equal(model.generate(ids, **options), reference.generate(ids, **GREEDY))


def test_an_interrupted_early_exit_leaves_the_model_whole():
    model, reference, _ = trio()
    with pytest.raises(Interrupted):
        model.generate(
            prompt(), assistant_early_exit=1, logits_processor=LogitsProcessorList([RaisingProcessor(3)]), **GREEDY
        )
    assert model.config.num_hidden_layers == len(model.model.layers) == 2
    assert torch.equal(model.generate(prompt(), **GREEDY), reference.generate(prompt(), **GREEDY))


# ---------------------------------------------------------------------- drafters that fail


class Failing(Drafter):
    """Drafts well until `place` raises on its second call."""

    name = "failing"

    def __init__(self, place: str):
        self.place = place
        self.calls = 0

    def _fail(self, place):
        if place == self.place:
            self.calls += 1
            if self.calls == 2 or place == "start":
                raise RuntimeError("out of ideas")

    def start(self, context):
        self._fail("start")

    def propose(self, request):
        self._fail("propose")
        return TokenTree.from_paths([request.token_ids[-3:]], self.name)

    def observe(self, outcomes):
        self._fail("observe")


@pytest.mark.parametrize("place", ["start", "propose", "observe"])
def test_a_drafter_that_raises_is_dropped(place, caplog):
    model, reference, draft = trio()
    want = reference.generate(prompt(), **GREEDY)
    options = dict(assistant_model=draft, return_spec_states=True, **GREEDY)
    with caplog.at_level(logging.WARNING, logger="hf_specstate"):
        out = model.generate(prompt(), spec_config=dict(drafters=[Failing(place), "assistant"]), **options)
    assert torch.equal(out.sequences, want)
    warned = [record for record in caplog.records if record.name.startswith("hf_specstate")]
    assert len(warned) == 1 and "out of ideas" in warned[0].getMessage()
    sources = {source for spec_round in out.spec_states[0][3:] for source in spec_round.sources}
    assert sources == {"assistant"}  # the others go on
    with pytest.raises(RuntimeError, match="out of ideas"):
        model.generate(prompt(), spec_config=dict(drafters=[Failing(place), "assistant"], strict=True), **options)
