"""
Every registered drafter gives the text of plain `generate()`, on every family, as chain and tree, alone and in a ragged
batch, greedy and sampled. Cells are combined pairwise. No cell may pass by not speculating: each must see drafted
tokens accepted and rejected.
"""

import pytest
import torch
from families import FAMILIES, VOCAB, noisy_copy, tiny

import hf_specstate
from examples.bigram_drafter import BigramDrafter
from hf_specstate import DRAFTERS
from hf_specstate.config import SCHEDULES

NEW_TOKENS = 32
SEEDS = 40  # texts tried until one cell has seen both outcomes
# an orthogonal array over (tree, batch of three, sampled) and its complement: every pair of choices occurs
COMBINATIONS = (
    ((False, False, False), (False, True, True), (True, False, True), (True, True, False)),
    ((True, True, True), (True, False, False), (False, True, False), (False, False, True)),
)
CELLS = [
    pytest.param(drafters, family, *choice, id=f"{name}-{family}-{'-'.join(names)}")
    for i, (name, drafters) in enumerate(
        [*((name, [name]) for name in DRAFTERS), ("bigram", [BigramDrafter()]), ("both", ["history", "assistant"])]
    )
    for j, family in enumerate(FAMILIES)
    for choice in COMBINATIONS[(i + j) % 2]
    for names in [(("chain", "tree")[choice[0]], ("row", "batch")[choice[1]], ("greedy", "sampled")[choice[2]])]
]


def make_inputs(model, batch: bool, seed: int) -> dict:
    """Repetitive random prompts, so that looking things up pays; a batch has three lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (12, 9, 6) if batch else (9,)
    rows = [torch.randint(4, VOCAB, (length // 3,), generator=generator).repeat(3) for length in lengths]
    longest = max(map(len, rows))
    left = not model.config.is_encoder_decoder
    padding = [(longest - len(row), 0) if left else (0, longest - len(row)) for row in rows]
    pad = torch.nn.functional.pad
    ids = torch.stack([pad(row, sides) for row, sides in zip(rows, padding, strict=True)])
    mask = torch.stack([pad(torch.ones_like(row), sides) for row, sides in zip(rows, padding, strict=True)])
    return {"input_ids": ids, "attention_mask": mask}


def some_token(sequences: torch.Tensor, row: int, step: int) -> int:
    """A token that the text will meet, to end a row of the batch early."""
    return int(sequences[row, step - NEW_TOKENS])


@pytest.mark.parametrize(("drafters", "family", "tree", "batch", "sampled"), CELLS)
def test_same_text_as_plain_generate(drafters, family, tree, batch, sampled):
    config = {"drafters": drafters, "tree_width": 2 if tree else 1, "strict": True, "lockstep": sampled}
    accepted = rejected = 0
    for seed in range(SEEDS):
        plain, model = tiny(family, seed=seed // 4), hf_specstate.enable(tiny(family, seed=seed // 4))
        inputs = make_inputs(model, batch, seed)
        draft = noisy_copy(plain, noise=0.1 * (1 + seed % 4))
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": sampled, "temperature": 0.3 if sampled else None}
        if batch:
            torch.manual_seed(seed)
            options["eos_token_id"] = some_token(plain.generate(**inputs, **options), row=1, step=10)
        torch.manual_seed(seed)
        expected = plain.generate(**inputs, **options)
        torch.manual_seed(seed)
        out = model.generate(**inputs, **options, assistant_model=draft, spec_config=config, return_spec_states=True)
        assert out.sequences.tolist() == expected.tolist()
        accepted += sum(sequence.num_accepted for sequence in out.spec_states)
        rejected += sum(sequence.num_drafted - sequence.num_accepted for sequence in out.spec_states)
        if accepted and rejected:
            return
    pytest.fail(f"{accepted} drafted tokens accepted and {rejected} rejected in {SEEDS} texts: nothing was shown")


@pytest.mark.goodput
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("assisted", [False, True], ids=["no assistant", "assistant"])
@pytest.mark.parametrize("batch", [False, True], ids=["row", "batch"])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_same_text_under_every_schedule(schedule, assisted, batch, sampled):
    drafted = 0
    for seed in range(6):
        plain, model = tiny("llama", seed=seed), hf_specstate.enable(tiny("llama", seed=seed))
        inputs = make_inputs(model, batch, seed)
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": sampled, "temperature": 0.3 if sampled else None}
        torch.manual_seed(seed)
        expected = plain.generate(**inputs, **options)
        torch.manual_seed(seed)
        out = model.generate(
            **inputs,
            **options,
            assistant_model=noisy_copy(plain, noise=0.1) if assisted else None,
            spec_config={"schedule": schedule, "strict": True, "lockstep": sampled},
            return_spec_states=True,
        )
        assert out.sequences.tolist() == expected.tolist()
        drafted += sum(sequence.num_drafted for sequence in out.spec_states)
        decisions = {spec_round.decision for sequence in out.spec_states for spec_round in sequence.rounds[1:]}
        assert (decisions == {None}) == (schedule != "goodput")
    # "goodput" goes by the clock, and on so small a model may find nothing worth drafting
    assert drafted or schedule == "goodput"


@pytest.mark.goodput
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "config",
    [{}, {"lockstep": True}, {"tree_width": 4}, {"drafters": ["history", "assistant", "recycling"]}],
    ids=["ragged", "lockstep", "wide", "mixed"],
)
def test_what_users_get_on_every_family(family, config):
    """The default schedule, greedy, in a batch one row of which ends early."""
    for seed in range(2):
        plain, model = tiny(family, seed=seed), hf_specstate.enable(tiny(family, seed=seed))
        inputs = make_inputs(model, True, seed)
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
        options["eos_token_id"] = some_token(plain.generate(**inputs, **options), row=1, step=10)
        expected = plain.generate(**inputs, **options)
        for assistant in (noisy_copy(plain, noise=0.1), None):
            if assistant is None and ("assistant" in config.get("drafters", []) or "tree_width" in config):
                continue
            out = model.generate(**inputs, **options, assistant_model=assistant, spec_config=config | {"strict": True})
            assert out.tolist() == expected.tolist()
