"""Real text: the embedded model gives the words of plain `generate()`, whatever drafts for it."""

import pytest
import torch

import hf_specstate
from eval.embedded_model import layer_skipping_draft, load_embedded_model
from eval.equality import first_difference

pytestmark = pytest.mark.slow

PROMPTS = [
    "List the days of the week from Monday to Sunday. Then list them again in the same order, three times in all.",
    "Write one sentence about a lighthouse keeper.",
    "What is 17 plus 25? Explain each step.",
]
NEW_TOKENS = 56


@pytest.fixture(scope="module")
def embedded():
    model, tokenizer = load_embedded_model()
    tokenizer.padding_side = "left"
    return hf_specstate.enable(model), layer_skipping_draft(model), tokenizer


def chat(tokenizer, prompts: list[str]):
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )


def assert_same(plain, out, prompt_length: int) -> None:
    for row in range(len(out.sequences)):
        expected, got = (result.sequences[row, prompt_length:].tolist() for result in (plain, out))
        difference = first_difference(expected, got, [step[row] for step in plain.scores], torch.float32)
        assert difference is None, difference


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("assisted", "width"), [(False, 1), (False, 2), (True, 1), (True, 2)])
def test_greedy_text(embedded, batch, assisted, width):
    model, draft, tokenizer = embedded
    inputs = chat(tokenizer, PROMPTS[:batch])
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "return_dict_in_generate": True}
    plain = model.generate(**inputs, **options, output_scores=True)
    config = {"tree_width": width, "max_nodes": 8, "strict": True}
    out = model.generate(
        **inputs, **options, assistant_model=draft if assisted else None, spec_config=config, return_spec_states=True
    )
    assert_same(plain, out, inputs["input_ids"].shape[1])
    assert sum(sequence.num_accepted for sequence in out.spec_states) > 0
    assert sum(sequence.num_drafted - sequence.num_accepted for sequence in out.spec_states) > 0


@pytest.mark.parametrize(("batch", "lockstep"), [(1, False), (3, True)])
def test_same_seed_same_sample(embedded, batch, lockstep):
    model, draft, tokenizer = embedded
    inputs = chat(tokenizer, PROMPTS[:batch])
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": True, "temperature": 0.7, "top_k": 20}
    options |= {"repetition_penalty": 1.1, "return_dict_in_generate": True, "output_scores": True}
    torch.manual_seed(7)
    plain = model.generate(**inputs, **options)
    torch.manual_seed(7)
    config = {"lockstep": lockstep, "strict": True}
    out = model.generate(**inputs, **options, assistant_model=draft, spec_config=config)
    assert out.sequences.tolist() == plain.sequences.tolist()
