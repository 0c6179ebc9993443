"""Corners in which speculation once gave another text, or fell over."""

import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import transformers
from families import noisy_copy, prompt, tiny
from transformers import DynamicCache, LlavaConfig, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

import hf_specstate
from hf_specstate import Drafter, TokenTree
from hf_specstate.compat import CACHE_NAME

STRICT = {"strict": True}


def a_batch() -> dict:
    rows = torch.cat([prompt(12), prompt(12, seed=9), prompt(4, seed=2).repeat(1, 3)])
    return {"input_ids": rows, "attention_mask": torch.ones_like(rows)}


@pytest.mark.parametrize(("family", "limit"), [("gpt2", "n_positions"), ("opt", "max_position_embeddings")])
@pytest.mark.parametrize("width", [1, 2])
def test_ragged_rows_stay_within_learned_positions(family, limit, width):
    """A row at its last position runs along while another still drafts; its fillers must not look past the table."""
    plain, model = tiny(family, **{limit: 48}), hf_specstate.enable(tiny(family, **{limit: 48}))
    options = {"max_length": 48, "do_sample": False}
    expected = plain.generate(**a_batch(), **options)
    for assistant in (None, noisy_copy(plain)):
        config = STRICT | {"max_nodes": 12, "tree_width": width}
        out = model.generate(**a_batch(), **options, assistant_model=assistant, spec_config=config)
        assert out.tolist() == expected.tolist()


@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize("family", ["llama", "bloom", "gemma3"])
def test_a_row_that_ended_leaves_its_last_token_in_the_cache(family, lockstep):
    """Plain decoding feeds the EOS of a row while other rows go on; a second turn sees it."""
    plain, model = tiny(family), hf_specstate.enable(tiny(family))
    batch = a_batch()
    eos = int(plain.generate(**batch, max_new_tokens=12, do_sample=False)[0, 12 + 4])
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": eos, "return_dict_in_generate": True}
    first = plain.generate(**batch, **options)
    ours = model.generate(
        **batch, **options, assistant_model=noisy_copy(plain), spec_config=STRICT | {"lockstep": lockstep}
    )
    assert ours.sequences.tolist() == first.sequences.tolist()
    assert (first.sequences[0] == 0).any()  # row 0 did end before the others

    ids = torch.cat([first.sequences, prompt(4, seed=5).expand(3, -1)], dim=1)
    mask = torch.cat([(first.sequences != 0).long(), torch.ones(3, 4, dtype=torch.long)], dim=1)
    second = [
        model_.generate(ids, attention_mask=mask, **{CACHE_NAME: result[CACHE_NAME]}, max_new_tokens=8, do_sample=False)
        for model_, result in ((plain, first), (plain, ours))
    ]
    assert second[0].tolist() == second[1].tolist()


@pytest.mark.parametrize("family", ["mistral_sliding", "gemma3"])
def test_sliding_windows_over_a_cache_made_without_a_config(family):
    plain, model = tiny(family), hf_specstate.enable(tiny(family))
    options = {"max_new_tokens": 20, "do_sample": False}
    expected = plain.generate(prompt(20), **options, **{CACHE_NAME: DynamicCache()})
    config = STRICT | {"tree_width": 2}
    out = model.generate(
        prompt(20), **options, **{CACHE_NAME: DynamicCache()}, assistant_model=noisy_copy(plain), spec_config=config
    )
    assert out.tolist() == expected.tolist()


class StopOnScores(StoppingCriteria):
    """Reads the scores as plain decoding hands them over: a tuple of `(batch_size, vocab_size)`."""

    def __call__(self, input_ids, scores, **kwargs):
        assert isinstance(scores, tuple)
        high = torch.stack(scores)[-1].max(dim=-1).values > 2.0
        return high & (len(scores) > 7)


@pytest.mark.parametrize("batch", [False, True])
def test_criteria_get_the_scores_as_a_tuple(batch):
    plain, model = tiny("llama"), hf_specstate.enable(tiny("llama"))
    inputs = a_batch() if batch else {"input_ids": prompt(12)}
    options = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    options["stopping_criteria"] = StoppingCriteriaList([StopOnScores()])
    expected = plain.generate(**inputs, **options)
    out = model.generate(**inputs, **options, assistant_model=noisy_copy(plain), spec_config=STRICT)
    assert out.sequences.tolist() == expected.sequences.tolist()
    assert 8 <= len(out.scores) < 24


@pytest.mark.parametrize("family", ["llama", "falcon"])
@pytest.mark.parametrize("width", [1, 2])
def test_attentions_asked_of_sdpa(family, width):
    plain, model = tiny(family), hf_specstate.enable(tiny(family))
    options = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True, "output_attentions": True}
    expected = plain.generate(prompt(12), **options)
    config = STRICT | {"tree_width": width}
    out = model.generate(prompt(12), **options, assistant_model=noisy_copy(plain), spec_config=config)
    assert out.sequences.tolist() == expected.sequences.tolist()
    assert len(out.attentions) == len(expected.attentions)


@dataclass
class Malformed(Drafter):
    name = "malformed"
    tree: object = None

    def propose(self, request):
        return self.tree


@pytest.mark.parametrize(
    "tree",
    [
        None,
        "abc",
        TokenTree([-1], [-1], [0.0], ["x"]),
        TokenTree([10_000], [-1], [0.0], ["x"]),
        TokenTree([1.5], [-1], [0.0], ["x"]),
        TokenTree([5, 6], [1, 0], [0.0, 0.0], ["x", "x"]),
        TokenTree([5, 6], [-1, 0], [0.0], ["x", "x"]),
    ],
)
def test_a_malformed_tree_drops_the_drafter_and_not_the_text(tree, caplog):
    plain, model = tiny("llama"), hf_specstate.enable(tiny("llama"))
    options = {"max_new_tokens": 12, "do_sample": False}
    with caplog.at_level("WARNING"):
        out = model.generate(prompt(12), **options, spec_config={"drafters": [Malformed(tree)]})
    assert out.tolist() == plain.generate(prompt(12), **options).tolist()
    assert sum("malformed" in record.getMessage() for record in caplog.records) == 1
    with pytest.raises((ValueError, AttributeError, TypeError)):
        model.generate(prompt(12), **options, spec_config=STRICT | {"drafters": [Malformed(tree)]})


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_change_with_length_are_refused_where_they_change(kind):
    rope = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 24}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    arguments = {"max_position_embeddings": 24, "rope_parameters": rope}
    plain, model = tiny("llama", **arguments), hf_specstate.enable(tiny("llama", **arguments))
    with pytest.raises(ValueError, match="rotary frequencies"):
        model.generate(prompt(12), max_new_tokens=20, do_sample=False, assistant_model=noisy_copy(plain))
    options = {"max_new_tokens": 12, "do_sample": False}
    out = model.generate(prompt(12), **options, assistant_model=noisy_copy(plain), spec_config=STRICT)
    assert out.tolist() == plain.generate(prompt(12), **options).tolist()


@pytest.mark.parametrize("given", ["inputs_embeds", "encoder_outputs"])
def test_an_assistant_with_an_encoder_needs_something_to_read(given):
    plain, model = tiny("t5"), hf_specstate.enable(tiny("t5"))
    read = model.get_input_embeddings() if given == "inputs_embeds" else model.get_encoder()
    inputs = {given: read(prompt(7))}
    with pytest.raises(ValueError, match="encoder of its own"):
        model.generate(**inputs, max_new_tokens=8, assistant_model=tiny("t5"))
    expected = plain.generate(**inputs, max_new_tokens=8, do_sample=False)
    out = model.generate(**inputs, max_new_tokens=8, do_sample=False, prompt_lookup_num_tokens=3, spec_config=STRICT)
    assert out.tolist() == expected.tolist()


def test_a_vision_language_model_is_probed_without_building_its_tower():
    with torch.device("meta"):
        model = transformers.LlavaForConditionalGeneration._from_config(LlavaConfig())
    assert hf_specstate.probe(model).rung == "tree"


class RemembersIds(transformers.LogitsProcessor):
    """Keeps the very tensors it was given and checks that nobody writes into them afterwards."""

    def __init__(self):
        self.seen: list[tuple[torch.Tensor, list]] = []

    def __call__(self, input_ids, scores):
        self.seen.append((input_ids, input_ids.tolist()))
        return scores


def test_a_processor_may_keep_the_ids_that_it_saw():
    plain, model = tiny("llama"), hf_specstate.enable(tiny("llama"))
    keeper = RemembersIds()
    options = {"max_new_tokens": 24, "do_sample": False, "logits_processor": LogitsProcessorList([keeper])}
    out = model.generate(prompt(12), **options, assistant_model=noisy_copy(plain), spec_config=STRICT)
    assert len(keeper.seen) == out.shape[1] - 12
    assert all(tensor.tolist() == copied == out[:, : 12 + i].tolist() for i, (tensor, copied) in enumerate(keeper.seen))


def test_several_drafters_of_chains_make_a_chain():
    """Merged, two chains are a tree, which Bloom cannot verify; what is left of them must be one chain."""
    plain, model = tiny("bloom"), hf_specstate.enable(tiny("bloom"))
    options = {"max_new_tokens": 24, "do_sample": False}
    config = STRICT | {"drafters": ["prompt_lookup", "assistant"]}
    out = model.generate(
        prompt(4).repeat(1, 3),
        **options,
        assistant_model=noisy_copy(plain),
        spec_config=config,
        return_spec_states=True,
    )
    assert out.sequences.tolist() == plain.generate(prompt(4).repeat(1, 3), **options).tolist()
    assert all(r.parents == list(range(-1, len(r.parents) - 1)) for r in out.spec_states[0])
    assert {"prompt_lookup", "assistant"} <= {source for r in out.spec_states[0] for source in r.sources}


@dataclass
class TooWide(Drafter):
    name = "too_wide"

    def propose(self, request):
        return TokenTree.from_paths([[5, 6], [7], [8]], self.name)


def test_a_drafter_cannot_make_a_tree_where_a_chain_was_asked_for():
    plain, model = tiny("bloom"), hf_specstate.enable(tiny("bloom"))
    options = {"max_new_tokens": 12, "do_sample": False}
    out = model.generate(prompt(8), **options, spec_config=STRICT | {"drafters": [TooWide()]}, return_spec_states=True)
    assert out.sequences.tolist() == plain.generate(prompt(8), **options).tolist()
    assert all(r.token_ids == [5, 6][: len(r.token_ids)] for r in out.spec_states[0])
    assert any(r.token_ids == [5, 6] for r in out.spec_states[0])


def test_other_default_dtypes_and_devices_change_nothing():
    plain, model = tiny("llama"), hf_specstate.enable(tiny("llama"))
    options = {"max_new_tokens": 16, "do_sample": True, "temperature": 0.5}
    torch.manual_seed(3)
    expected = plain.generate(**a_batch(), **options, repetition_penalty=1.2)
    torch.set_default_dtype(torch.bfloat16)
    try:
        torch.manual_seed(3)
        config = STRICT | {"lockstep": True}
        out = model.generate(
            **a_batch(), **options, repetition_penalty=1.2, assistant_model=noisy_copy(plain), spec_config=config
        )
    finally:
        torch.set_default_dtype(torch.float32)
    assert out.tolist() == expected.tolist()


@pytest.mark.parametrize("way", ["assistant", "no assistant", "history"])
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64, "meta"], ids=str)
def test_defaults_of_torch_change_nothing_without_lockstep_either(default, way):
    plain, model = tiny("llama"), hf_specstate.enable(tiny("llama"))
    options = {"max_new_tokens": 16, "do_sample": False}
    expected = plain.generate(**a_batch(), **options, repetition_penalty=1.2)
    batch, history = a_batch(), hf_specstate.DraftHistory()
    ways = {
        "assistant": {"assistant_model": noisy_copy(plain)},
        "no assistant": {},
        "history": {"draft_history": history},
    }
    options |= ways[way] | {"spec_config": STRICT, "return_spec_states": True, "repetition_penalty": 1.2}
    try:
        if isinstance(default, torch.dtype):
            torch.set_default_dtype(default)
        else:
            torch.set_default_device(default)
        out = model.generate(**batch, **options)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert out.sequences.tolist() == expected.tolist()
    assert sum(sequence.num_drafted for sequence in out.spec_states)


def test_the_heuristic_schedule_starts_where_it_is_told_to():
    plain, model = tiny("llama"), hf_specstate.enable(tiny("llama"))
    options = {"max_new_tokens": 24, "do_sample": False, "assistant_model": plain, "return_spec_states": True}
    options["num_assistant_tokens_schedule"] = "heuristic"  # the assistant is the model: all is accepted, it grows
    first, goes_on, told = (
        model.generate(prompt(8), **options, num_assistant_tokens=start).spec_states[0] for start in (2, 2, 3)
    )
    assert [len(states[1].token_ids) for states in (first, told)] == [2, 3]
    assert len(goes_on[1].token_ids) > 2


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_an_assistant_with_an_encoder_and_several_sequences_per_prompt(family):
    model = hf_specstate.enable(tiny(family))
    out = model.generate(
        torch.cat([prompt(seed=3), prompt(seed=4)]), assistant_model=noisy_copy(tiny(family)), max_new_tokens=16,
        do_sample=True, top_k=1, num_return_sequences=2, return_spec_states=True, spec_config=STRICT,
    )  # fmt: skip
    assert out.spec_states.num_accepted > 0
    assert out.sequences[0].tolist() == out.sequences[1].tolist() and len(out.sequences) == 4


def test_numbers_of_numpy_are_numbers():
    model = hf_specstate.enable(tiny("llama"))
    options = dict(max_new_tokens=8, do_sample=False, assistant_model=noisy_copy(tiny("llama")))
    config = dict(tree_width=np.int64(2), confidence_threshold=np.float32(0.5), record_top_k=np.int32(3), strict=True)
    got = model.generate(prompt(), num_assistant_tokens=np.int64(3), spec_config=config, **options)
    assert torch.equal(got, hf_specstate.disable(model).generate(prompt(), max_new_tokens=8, do_sample=False))
    json.dumps(hf_specstate.SpecStateConfig(**config).to_dict())
