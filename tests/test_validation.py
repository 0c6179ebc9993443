"""What cannot be done is refused in one sentence, before the target has run, and leaves the model as it was."""

import copy

import pytest
import torch
import transformers
from transformers import BitsAndBytesConfig, DynamicCache, MambaConfig, MambaForCausalLM

from hf_specstate import Drafter, SpecStateConfig, disable, enable
from hf_specstate.compat import CACHE_NAME
from tests.families import noisy_copy, prompt, tiny

GREEDY = dict(max_new_tokens=6, do_sample=False)


def assert_refused(model, names: str, ids=None, **kwargs) -> None:
    """`generate` refuses the call in a sentence with `names` in it, and nothing has happened to the model."""
    ids = prompt() if ids is None else ids
    plain = disable(copy.deepcopy(model)).generate(ids, **GREEDY)
    forwards = []
    handle = model.register_forward_pre_hook(lambda *_: forwards.append(1))
    with pytest.raises(ValueError) as caught:
        model.generate(ids, **(GREEDY | kwargs))
    handle.remove()
    message = str(caught.value)
    assert names in message
    assert message.endswith(".") and ". " not in message and "\n" not in message, message
    assert not forwards
    assert torch.equal(model.generate(ids, **GREEDY), plain)


def llama(**overrides):
    return enable(tiny("llama", **overrides))


def draft(**overrides):
    return noisy_copy(tiny("llama", **overrides))


# ---------------------------------------------------------------------- decoding modes


@pytest.mark.parametrize("ours", [dict(return_spec_states=True), dict(spec_config=dict(max_nodes=4))])
@pytest.mark.parametrize(
    "mode, names",
    [
        (dict(num_beams=2), "beam search"),
        (dict(num_beams=2, do_sample=True), "beam sample"),
        (dict(num_beams=2, num_beam_groups=2, diversity_penalty=1.0), "group beam search"),
        (dict(penalty_alpha=0.6, top_k=4), "contrastive search"),
        (dict(dola_layers="low"), "dola generation"),
        (dict(cache_implementation="paged"), "cache_implementation='paged'"),
    ],
)
def test_other_decoding_modes(ours, mode, names):
    assert_refused(llama(), names, **mode, **ours)
    assert_refused(llama(), next(iter(ours)), **mode, **ours)


@pytest.mark.parametrize("mode", [dict(num_beams=2), dict(num_beams=3, num_return_sequences=2)])
def test_other_modes_without_our_arguments_are_left_alone(mode):
    assert torch.equal(llama().generate(prompt(), **mode, **GREEDY), tiny("llama").generate(prompt(), **mode, **GREEDY))


# ---------------------------------------------------------------------- the target and its cache

SPECULATING = [
    pytest.param(lambda: dict(return_spec_states=True), id="model-free"),
    pytest.param(lambda: dict(assistant_model=draft()), id="assistant"),
    pytest.param(lambda: dict(prompt_lookup_num_tokens=3), id="prompt lookup"),
]


@pytest.mark.parametrize("speculating", SPECULATING)
def test_no_cache(speculating):
    assert_refused(llama(), "use_cache=True", use_cache=False, **speculating())


class UncroppableLayer(transformers.cache_utils.QuantizedLayer):
    """Quantises to 8 bits, as the backends do that need extra packages."""

    def _quantize(self, tensor, axis):
        scale = tensor.abs().max() / 127
        return (tensor / scale).round().to(torch.int8), scale

    def _dequantize(self, quantized):
        return quantized[0].float() * quantized[1]


@pytest.mark.parametrize("speculating", SPECULATING)
def test_quantized_cache(speculating):
    cache = transformers.Cache(layers=[UncroppableLayer() for _ in range(2)])
    assert_refused(llama(), "cache_implementation", **{CACHE_NAME: cache}, **speculating())
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("speculating", SPECULATING)
def test_offloaded_cache(speculating):
    model = llama()
    cache = DynamicCache(config=model.config)
    cache.offloading = True  # its constructor asks for an accelerator
    assert_refused(model, "cache_implementation", **{CACHE_NAME: cache}, **speculating())


@pytest.mark.parametrize("speculating", SPECULATING)
def test_static_cache_over_a_sliding_window(speculating):
    model = enable(tiny("mistral_sliding"))
    assert_refused(model, "cache_implementation", cache_implementation="static", **speculating())


@pytest.mark.parametrize("speculating", SPECULATING)
def test_stateful_models(speculating):
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, state_size=4, pad_token_id=0)
    model = enable(MambaForCausalLM(config).eval())
    assert_refused(model, "MambaForCausalLM", **speculating())


@pytest.mark.parametrize("settings", [dict, lambda **fields: BitsAndBytesConfig(**fields)], ids=["dict", "object"])
@pytest.mark.parametrize("threshold", [6.0, 0.5])
def test_int8_with_an_outlier_threshold(settings, threshold):
    model = llama()
    model.config.quantization_config = settings(load_in_8bit=True, llm_int8_threshold=threshold)
    assert_refused(model, "llm_int8_threshold=0", assistant_model=draft())


# ---------------------------------------------------------------------- the assistant


def test_another_vocabulary_needs_its_tokenizers():
    assert_refused(llama(), "assistant_tokenizer=", assistant_model=draft(vocab_size=2000))


def test_a_stateful_assistant():
    config = MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, state_size=4, pad_token_id=0)
    assert_refused(llama(), "assistant_model", assistant_model=MambaForCausalLM(config).eval())


def test_assistants_that_are_sharded_parameter_by_parameter():
    """As by DeepSpeed's ZeRO-3: every forward of one rank needs all others."""
    sharded = draft()
    next(sharded.parameters()).ds_id = 0
    assert_refused(llama(), "is sharded", assistant_model=sharded, synced_gpus=True)
    model = llama()
    next(model.parameters()).ds_id = 0
    assert_refused(model, "is sharded", assistant_early_exit=1, synced_gpus=True)


def test_lossy_ensembles():
    assert_refused(llama(), "assistant_ensemble_weight", assistant_model=draft(), assistant_ensemble_weight=0.5)


@pytest.mark.parametrize("layers", [-1, 0, 2, 7])
def test_early_exits_outside_the_model(layers):
    assert_refused(llama(), "assistant_early_exit", assistant_early_exit=layers)


def gemma4_assistant():
    config = transformers.Gemma4AssistantConfig(
        text_config=dict(
            model_type="gemma4_text", vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, head_dim=8, global_head_dim=8, hidden_size_per_layer_input=0,
            vocab_size_per_layer_input=0,
        ),
        backbone_hidden_size=16,
    )  # fmt: skip
    return transformers.Gemma4AssistantForCausalLM(config).eval()


@pytest.mark.parametrize("ours", [dict(return_spec_states=True), dict(spec_config=dict(max_nodes=4))])
@pytest.mark.parametrize(
    "make, names",
    [
        (lambda: dict(use_mtp=True), "use_mtp=True"),
        (lambda: dict(assistant_model=draft(), speculation_type="dflash"), "speculation_type='dflash'"),
        (lambda: dict(assistant_model=gemma4_assistant()), "Gemma4AssistantForCausalLM"),
    ],
    ids=["mtp", "dflash", "gemma4"],
)
def test_assistants_that_live_in_transformers_own_loop(make, names, ours):
    if "gemma4" in names.lower() and not hasattr(transformers, "Gemma4AssistantForCausalLM"):
        pytest.skip("this release of transformers has no such assistant")
    options = make()
    assert_refused(llama(), names, **options, **ours)
    assert_refused(llama(), "return_spec_states", **options, **ours)


# ---------------------------------------------------------------------- spec_config


@pytest.mark.parametrize(
    "spec_config, names",
    [
        (dict(max_node=4), "max_node"),
        ("constant", "spec_config"),
        (["assistant"], "spec_config"),
        (dict(max_nodes=-1), "max_nodes"),
        (dict(max_nodes=2.5), "max_nodes"),
        (dict(max_nodes=True), "max_nodes"),
        (dict(tree_width=0), "tree_width"),
        (dict(tree_width=1.5), "tree_width"),
        (dict(acceptance="typical"), "acceptance"),
        (dict(acceptance=None), "acceptance"),
        (dict(schedule="sometimes"), "schedule"),
        (dict(confidence_threshold=1.5), "confidence_threshold"),
        (dict(confidence_threshold="high"), "confidence_threshold"),
        (dict(confidence_threshold=float("nan")), "confidence_threshold"),
        (dict(lockstep="yes"), "lockstep"),
        (dict(strict=1), "strict"),
        (dict(drafters="assistant"), "drafters"),
        (dict(drafters=[]), "drafters"),
        (dict(drafters=["nobody"]), "nobody"),
        (dict(drafters=[dict(name="assistant")]), "drafters"),
        (dict(drafters=[Drafter]), "drafters"),
        (dict(acceptance="rejection", tree_width=2), "acceptance='rejection'"),
    ],
    ids=str,
)
def test_spec_config(spec_config, names):
    assert_refused(llama(), names, spec_config=spec_config, assistant_model=draft())
    assert_refused(llama(), "spec_config", spec_config=spec_config)


def test_the_choices_are_named():
    with pytest.raises(ValueError, match="match, rejection"):
        SpecStateConfig(acceptance="typical")
    with pytest.raises(ValueError, match="the fields are drafters, max_nodes"):
        SpecStateConfig.from_any(dict(unknown=1))


@pytest.mark.parametrize(
    "argument, value",
    [
        ("num_assistant_tokens", -1),
        ("num_assistant_tokens", "many"),
        ("num_assistant_tokens_schedule", "sometimes"),
        ("assistant_confidence_threshold", 1.5),
        ("prompt_lookup_num_tokens", -1),
    ],
)
def test_transformers_own_arguments(argument, value):
    assert_refused(llama(), argument, **{"assistant_model": draft(), argument: value})


def test_the_config_survives_json():
    config = SpecStateConfig(
        drafters=["assistant", "prompt_lookup"], max_nodes=3, tree_width=2, schedule="heuristic", strict=True
    )
    assert SpecStateConfig.from_json_string(config.to_json_string()) == config
    assert SpecStateConfig.from_any(config.to_dict()) == config
    assert SpecStateConfig.from_any(None) == SpecStateConfig()

    class Mine(Drafter):
        name = "mine"

    with pytest.raises(ValueError, match="drafters"):
        SpecStateConfig(drafters=[Mine()]).to_json_string()


def test_a_drafter_that_needs_an_assistant():
    assert_refused(llama(), "assistant_model=", spec_config=dict(drafters=["assistant"], strict=True))
