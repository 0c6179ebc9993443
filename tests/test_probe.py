"""What the probe finds out about a model, and what it leaves alone."""

import copy
import functools

import pytest
import torch
import transformers
from families import FAMILIES, VOCAB, tiny
from transformers import LlamaForCausalLM

import hf_specstate
from hf_specstate import probe
from hf_specstate.compat import CACHE_NAME

TREE, RAGGED, LOCKSTEP, REFUSED = "tree", "ragged chain", "lockstep chain", "refused"
RUNGS = {
    **dict.fromkeys("llama qwen2 qwen3 mistral gpt2 opt gpt_neox phi mixtral falcon".split(), (TREE, "holes")),
    **dict.fromkeys(("mistral_sliding", "gemma2", "gemma3"), (TREE, "aligned")),
    "bloom": (RAGGED, "holes"),
    **dict.fromkeys(("mpt", "t5"), (RAGGED, "aligned")),
    "bart": (LOCKSTEP, "lockstep"),
}
SMALL = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16)
LINEAR = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
    layer_types=["linear_attention", "full_attention"],
)  # fmt: skip
# models whose state cannot be rolled back to an earlier token
RECURRENT = {
    "Mamba": dict(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=8),
    "Jamba": {k: v for k, v in SMALL.items() if k != "head_dim"}
    | dict(num_hidden_layers=4, attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False, mamba_d_state=8),
    "Qwen3Next": SMALL | EXPERTS | LINEAR | dict(num_hidden_layers=2),
}


def test_the_table_has_every_family():
    assert set(RUNGS) == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_rung_of_family(family):
    support = probe(tiny(family))
    assert (support.rung, support.rows) == RUNGS[family]
    assert bool(support.reason) == (support.rung != TREE)


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_states_are_refused(name):
    config = getattr(transformers, f"{name}Config")(**RECURRENT[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    assert probe(model).rung == REFUSED
    with pytest.raises(ValueError, match=f"{name}ForCausalLM (cannot speculate exactly|keeps no transformers `Cache`)"):
        hf_specstate.enable(model).generate(
            torch.ones((1, 4), dtype=torch.long), max_new_tokens=4, return_spec_states=True
        )


def test_small_initial_weights_hide_nothing():
    support = probe(tiny("t5", initializer_factor=0.05))
    assert (support.rung, support.rows) == RUNGS["t5"]


def test_probing_leaves_everything_alone():
    model = tiny("llama", max_position_embeddings=300)  # its own config, so that nothing is remembered
    model.train()
    weights, config = copy.deepcopy(model.state_dict()), model.config.to_json_string()
    generation_config, state = model.generation_config.to_json_string(), torch.get_rng_state()
    assert probe(model).rung == TREE
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert model.config.to_json_string() == config
    assert model.generation_config.to_json_string() == generation_config
    assert all(torch.equal(weights[name], weight) for name, weight in model.state_dict().items())


def test_enabled_and_large_models_are_probed_as_their_own_class():
    """A large model is never run, nor copied: on the meta device it could not be."""
    with torch.device("meta"):
        large = LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=40))
    assert probe(large).rung == TREE
    assert probe(hf_specstate.enable(large)).rung == TREE


# ---------------------------------------------------------------------- architectures with a twist


same_signature = functools.wraps(LlamaForCausalLM.forward)  # generation looks at it


class Unpositioned(LlamaForCausalLM):
    """Counts slots, whatever positions it is told: wrong for siblings, and for rows that skip or move slots."""

    @same_signature
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs | {"position_ids": None})


class SlotCounting(LlamaForCausalLM):
    """Its logits depend on how many slots there are: wrong as soon as rows share a cache with holes or padding."""

    @same_signature
    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        width, cache = outputs.logits.shape[1], kwargs.get(CACHE_NAME)
        slots = width if cache is None else cache.get_seq_length()
        slot = torch.arange(slots - width, slots)[:, None]
        outputs.logits = outputs.logits + torch.sin(slot * torch.arange(outputs.logits.shape[-1]))
        return outputs


class TreeBlind(LlamaForCausalLM):
    """Overlooks masks that name single slots, silently."""

    @same_signature
    def forward(self, *args, **kwargs):
        mask = kwargs.get("attention_mask")
        return super().forward(
            *args, **kwargs | {"attention_mask": None if mask is not None and mask.ndim > 2 else mask}
        )


class WidthCounting(LlamaForCausalLM):
    """Its logits depend on how many tokens share a forward: never exact."""

    @same_signature
    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits * (1 + 0.01 * outputs.logits.shape[1])
        return outputs


class Fragile(LlamaForCausalLM):
    """Cannot be built with another vocabulary, so the probe has only the model itself."""

    forwards = 0

    def __init__(self, config):
        if config.vocab_size != VOCAB:
            raise ValueError("this vocabulary or none")
        super().__init__(config)

    @same_signature
    def forward(self, *args, **kwargs):
        self.forwards += 1
        return super().forward(*args, **kwargs)


class FragileSlotCounting(Fragile, SlotCounting):
    pass


def twisted(kind: type) -> LlamaForCausalLM:
    model = tiny("llama")
    model.__class__ = kind
    return model


@pytest.mark.parametrize(
    ("kind", "rung", "rows"),
    [
        (TreeBlind, RAGGED, "holes"),
        (Unpositioned, LOCKSTEP, "lockstep"),
        (SlotCounting, LOCKSTEP, "lockstep"),
        (WidthCounting, REFUSED, "none"),
        (FragileSlotCounting, LOCKSTEP, "lockstep"),
    ],
)
def test_wrong_architectures_come_down(kind, rung, rows):
    support = probe(twisted(kind))
    assert (support.rung, support.rows) == (rung, rows)
    assert support.reason


def test_a_config_that_cannot_shrink_leaves_the_model_itself():
    model = twisted(Fragile)
    state = torch.get_rng_state()
    assert (probe(model).rung, probe(model).rows) == (TREE, "holes")
    assert model.forwards > 0
    assert torch.equal(torch.get_rng_state(), state)
    ordinary = twisted(type("Sturdy", (Fragile,), {"__init__": LlamaForCausalLM.__init__}))
    assert probe(ordinary).rung == TREE
    assert ordinary.forwards == 0, "others are left out of it"
