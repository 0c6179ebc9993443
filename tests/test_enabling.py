"""An enabled model is the same model: to Python, to transformers, to accelerate and PEFT, and to whoever owns it."""

import copy
import io
import json
import pickle
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.generation import GenerationMixin

from hf_specstate import SpecStateConfig, disable, enable, is_enabled
from tests.families import noisy_copy, prompt, tiny

GREEDY = dict(max_new_tokens=16, do_sample=False)
STRICT = dict(strict=True)
TREE = dict(strict=True, tree_width=2)


@pytest.fixture
def model() -> PreTrainedModel:
    return enable(tiny("llama"))


@pytest.fixture
def reference() -> PreTrainedModel:
    """The same weights, never enabled."""
    return tiny("llama")


@pytest.fixture
def draft(reference) -> PreTrainedModel:
    return noisy_copy(reference)


def speculate(model, draft, ids=None, **kwargs):
    arguments = GREEDY | dict(assistant_model=draft, return_spec_states=True, spec_config=STRICT) | kwargs
    return model.generate(prompt() if ids is None else ids, **arguments)


def drafted_sizes(output, row: int = 0) -> list[int]:
    return [len(spec_round.token_ids) for spec_round in output.spec_states[row]][1:]  # without the prefill


# ---------------------------------------------------------------------- the subclass


def test_enable_and_disable_work_in_place(reference):
    model = tiny("llama")
    assert not is_enabled(model)
    assert enable(model) is model and is_enabled(model)
    assert enable(model) is model and is_enabled(model)  # twice is once
    assert disable(model) is model and not is_enabled(model)
    assert type(model) is LlamaForCausalLM
    assert disable(model) is model and type(model) is LlamaForCausalLM
    assert not is_enabled(reference)  # the class itself was left alone


def test_the_class_looks_like_the_models_own(model, reference):
    assert isinstance(model, LlamaForCausalLM) and isinstance(model, PreTrainedModel)
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(type(model), name) == getattr(LlamaForCausalLM, name)
    assert type(model) is type(enable(tiny("llama", seed=1)))  # one class for all models of a class
    assert list(model.state_dict()) == list(reference.state_dict())
    assert model.is_remote_code() == reference.is_remote_code()


def test_saving_writes_the_models_own_architecture(model, reference, tmp_path):
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is LlamaForCausalLM
    assert torch.equal(loaded.generate(prompt(), **GREEDY), reference.generate(prompt(), **GREEDY))


def by_torch_save(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("duplicate", [lambda m: pickle.loads(pickle.dumps(m)), copy.deepcopy, by_torch_save])
def test_copies_are_enabled_and_independent(model, draft, duplicate):
    before = speculate(model, draft).sequences
    twin = duplicate(model)
    assert is_enabled(twin) and type(twin) is type(model)
    assert torch.equal(speculate(twin, draft).sequences, before)
    with torch.no_grad():
        twin.lm_head.weight.zero_()
    disable(twin)
    assert is_enabled(model)
    assert torch.equal(speculate(model, draft).sequences, before)


# ---------------------------------------------------------------------- what cannot be enabled


class Wrapper(nn.Module):
    """What DistributedDataParallel looks like from outside."""

    def __init__(self, module):
        super().__init__()
        self.module = module


@pytest.mark.parametrize(
    "make, names",
    [
        (lambda: Wrapper(tiny("llama")), "model.module"),
        (lambda: BertModel(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1)), "BertModel"),
        (lambda: nn.Linear(2, 2), "Linear"),
        (lambda: "a path", "str"),
    ],
)  # fmt: skip
def test_what_cannot_generate_is_refused(make, names):
    with pytest.raises(TypeError, match=names):
        enable(make())


def test_peft_models_are_enabled_at_their_base(draft):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    settings = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(tiny("llama"), settings).eval()
    plain = adapted.generate(input_ids=prompt(), **GREEDY)
    assert not torch.equal(plain, tiny("llama").generate(prompt(), **GREEDY))  # the adapter does something
    with pytest.raises(TypeError, match=r"enable its base.*get_base_model"):
        enable(adapted)

    enable(adapted.get_base_model())
    out = adapted.generate(
        input_ids=prompt(), assistant_model=draft, return_spec_states=True, spec_config=STRICT, **GREEDY
    )
    assert torch.equal(out.sequences, plain)
    assert out.spec_states[0].num_drafted > 0


# ---------------------------------------------------------------------- wrappers, offloading, compilation


def on_disk(model, folder):
    from accelerate import disk_offload

    return disk_offload(model, str(folder), execution_device=torch.device("cpu"))


def on_cpu(model, folder):
    from accelerate import cpu_offload

    return cpu_offload(model, execution_device=torch.device("cpu"))


@pytest.mark.parametrize("config", [STRICT, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("offload", [on_cpu, on_disk])
@pytest.mark.parametrize("first", ["enable", "offload"])
def test_offloaded_models(reference, draft, tmp_path, offload, first, config):
    model = tiny("llama")
    model = offload(enable(model), tmp_path) if first == "enable" else enable(offload(model, tmp_path))
    assert next(model.parameters()).device.type == "meta"
    out = speculate(model, draft, spec_config=config)
    assert torch.equal(out.sequences, reference.generate(prompt(), **GREEDY))
    assert out.spec_states[0].num_accepted > 0


def test_offloaded_models_exit_early(reference, tmp_path):
    model = enable(on_disk(tiny("llama"), tmp_path))
    out = speculate(model, None, assistant_early_exit=1)
    assert torch.equal(out.sequences, reference.generate(prompt(), **GREEDY))
    assert out.spec_states[0].num_drafted > 0


def test_device_map_with_disk(reference, draft, tmp_path):
    reference.save_pretrained(tmp_path / "model")
    names = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head")
    device_map = dict.fromkeys(names, "cpu") | {"model.layers.1": "disk"}
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offload"
    )
    out = speculate(enable(loaded), draft)
    assert torch.equal(out.sequences, reference.generate(prompt(), **GREEDY))


def test_accelerator_prepare_and_unwrap(model, reference, draft):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    prepared = accelerator.unwrap_model(accelerator.prepare(model))
    assert is_enabled(prepared)
    assert torch.equal(speculate(prepared, draft).sequences, reference.generate(prompt(), **GREEDY))


@pytest.mark.parametrize("first", ["enable", "compile"])
def test_compiled_models(reference, draft, first):
    torch.compiler.reset()
    model = tiny("llama")
    if first == "enable":
        compiled = torch.compile(enable(model), backend="eager")
    else:
        compiled = enable(torch.compile(model, backend="eager"))
    assert is_enabled(compiled) and is_enabled(model)
    out = speculate(compiled, draft)
    assert torch.equal(out.sequences, reference.generate(prompt(), **GREEDY))
    assert out.spec_states[0].num_accepted > 0
    disable(compiled)
    assert not is_enabled(model)


# ---------------------------------------------------------------------- without our arguments


@pytest.mark.parametrize(
    "options", [dict(), dict(do_sample=True), dict(num_beams=2)], ids=["greedy", "sample", "beams"]
)
def test_other_calls_run_the_stock_code(model, reference, options):
    options = GREEDY | dict(return_dict_in_generate=True, output_scores=True) | options
    outputs, forwards = [], []
    for candidate in (reference, model):
        calls = []
        handle = candidate.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        torch.manual_seed(0)
        outputs.append(candidate.generate(prompt(), **options))
        handle.remove()
        forwards.append(len(calls))
    want, got = outputs
    assert type(got) is type(want)
    assert torch.equal(got.sequences, want.sequences)
    assert all(torch.equal(a, b) for a, b in zip(got.scores, want.scores, strict=True))
    assert forwards[0] == forwards[1]


def test_other_calls_go_through_generation_mixin(model, monkeypatch):
    seen = []
    stock = GenerationMixin._sample

    def spy(self, *args, **kwargs):
        seen.append(self)
        return stock(self, *args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "_sample", spy)
    model.generate(prompt(), **GREEDY)
    assert seen == [model]
    model.generate(prompt(), return_spec_states=True, **GREEDY)
    assert seen == [model]  # and a speculative one does not


@pytest.mark.parametrize("typo", ["retrun_spec_states", "spec_cfg"])
def test_typos_are_still_refused(model, draft, typo):
    with pytest.raises(ValueError, match=typo):
        model.generate(prompt(), assistant_model=draft, **{typo: True}, **GREEDY)


# ---------------------------------------------------------------------- arguments that are kept in a generation config


def test_arguments_kept_in_the_models_generation_config(model, reference, tmp_path):
    # one of the user's own: transformers does not reload unknown entries of one that it derived from the model's config
    model.generation_config = GenerationConfig(pad_token_id=0, return_spec_states=True)
    model.generation_config.spec_config = SpecStateConfig(drafters=["prompt_lookup"], max_nodes=3).to_dict()
    model.save_pretrained(tmp_path)
    want = reference.generate(prompt(), **GREEDY)

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    ignored = loaded.generate(prompt(), **GREEDY)
    assert torch.equal(ignored, want)  # a tensor: not even the kind of output changes for who does not enable

    out = enable(loaded).generate(prompt(), **GREEDY)
    assert torch.equal(out.sequences, want)
    assert max(drafted_sizes(out)) == 3
    kept = loaded.generation_config.to_dict()
    assert kept["return_spec_states"] is True and kept["spec_config"]["max_nodes"] == 3


@pytest.mark.parametrize("default", [dict(return_spec_states=True), dict(spec_config=dict(max_nodes=3))], ids=str)
def test_arguments_kept_in_the_models_config_give_way_to_calls_that_cannot_speculate(model, reference, default):
    model.generation_config = GenerationConfig(pad_token_id=0, **default)
    beams = GREEDY | dict(num_beams=2)
    for options in (beams, GREEDY | dict(use_cache=False)):
        assert torch.equal(model.generate(prompt(), **options), reference.generate(prompt(), **options))
    with pytest.raises(ValueError, match="beam search"):
        model.generate(prompt(), return_spec_states=True, **beams)
    with pytest.raises(ValueError, match="beam search"):
        model.generate(prompt(), generation_config=GenerationConfig(**default, **beams))


def test_arguments_in_a_passed_generation_config(model, reference, draft):
    passed = GenerationConfig(return_spec_states=True, spec_config=dict(max_nodes=3, strict=True), **GREEDY)
    before = passed.to_dict()
    out = model.generate(prompt(), generation_config=passed, assistant_model=draft)
    assert torch.equal(out.sequences, reference.generate(prompt(), **GREEDY))
    assert max(drafted_sizes(out)) == 3
    assert passed.to_dict() == before
    quiet = model.generate(prompt(), generation_config=passed, assistant_model=draft, return_spec_states=False)
    assert torch.equal(quiet, out.sequences)  # the call goes before the config


# ---------------------------------------------------------------------- the user's objects


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(num_assistant_tokens_schedule="heuristic", num_assistant_tokens=2),
        dict(spec_config=TREE),
        dict(do_sample=True, spec_config=dict(strict=True, acceptance="rejection")),
    ],
    ids=["chain", "heuristic", "tree", "rejection"],
)
def test_the_users_objects_stay_as_they_are(model, draft, options):
    draft.generation_config.num_assistant_tokens = 4

    def state():
        weights = {
            f"{role}.{name}": value.clone()
            for role, m in (("model", model), ("draft", draft))
            for name, value in m.state_dict().items()
        }
        configs = [
            part.to_dict()
            for part in (model.config, model.generation_config, draft.config, draft.generation_config)
        ]  # fmt: skip
        return weights, configs, {m: (set(vars(m)), type(m)) for m in (model, draft)}

    before, configs, attributes = state()
    for _ in range(2):
        speculate(model, draft, **options)
    after, configs_after, attributes_after = state()
    assert configs_after == configs
    assert attributes_after == attributes
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("config", [STRICT, TREE], ids=["chain", "tree"])
def test_greedy_calls_leave_the_random_state_alone(config):
    model = enable(
        tiny("llama", rope_parameters={"rope_type": "default", "rope_theta": 5e3 + config.get("tree_width", 1)})
    )
    draft = noisy_copy(disable(copy.deepcopy(model)))
    torch.manual_seed(5)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    speculate(model, draft, spec_config=config)  # no model of this config was probed before
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]


@pytest.mark.parametrize("by", ["assistant", "early exit", "prompt lookup", "trees"])
def test_two_threads_on_one_model(draft, by):
    model = enable(tiny("llama", num_hidden_layers=3))
    options = {
        "assistant": dict(),
        "early exit": dict(assistant_model=None, assistant_early_exit=1),
        "prompt lookup": dict(assistant_model=None),
        "trees": dict(spec_config=TREE),
    }[by]
    prompts = [prompt(seed=seed) for seed in range(8)]
    want = [tiny("llama", num_hidden_layers=3).generate(ids, **GREEDY) for ids in prompts]
    with ThreadPoolExecutor(2) as pool:
        got = list(pool.map(lambda ids: speculate(model, draft, ids, **options).sequences, prompts))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


# ---------------------------------------------------------------------- which setting counts

LEVELS = ("call", "spec_config", "passed generation_config", "model's", "assistant's")
FIELDS = {
    "num_assistant_tokens": "max_nodes",
    "num_assistant_tokens_schedule": "schedule",
    "assistant_confidence_threshold": "confidence_threshold",
}


def sizes_with(settings: dict[str, dict]) -> list[int]:
    """Sizes of the drafts when each level in `settings` sets the given generation arguments."""
    reference = tiny("llama")
    model, draft = enable(tiny("llama")), copy.deepcopy(reference)  # a perfect draft: no rejection changes a size
    kwargs = dict(max_new_tokens=40, do_sample=False)
    for argument, value in settings.get("call", {}).items():
        kwargs[argument] = value
    spec_config = {FIELDS[argument]: value for argument, value in settings.get("spec_config", {}).items()}
    if "passed generation_config" in settings:
        kwargs = {"generation_config": GenerationConfig(**(kwargs | settings["passed generation_config"]))}
        kwargs |= settings.get("call", {})
    model.generation_config.update(**settings.get("model's", {}))
    draft.generation_config.update(**settings.get("assistant's", {}))
    out = model.generate(
        prompt(), assistant_model=draft, return_spec_states=True, spec_config=spec_config | STRICT, **kwargs
    )
    assert torch.equal(out.sequences, reference.generate(prompt(), max_new_tokens=40, do_sample=False))
    return drafted_sizes(out)


@pytest.mark.parametrize("first", LEVELS)
@pytest.mark.parametrize(
    "argument, winner, loser, sizes",
    [
        ("num_assistant_tokens", 3, 5, [3, 3, 3]),
        ("num_assistant_tokens_schedule", "heuristic_transient", "constant", [2, 4, 6]),
        ("assistant_confidence_threshold", 1.0, 0.0, [1, 1, 1]),
    ],
)
def test_the_nearest_setting_counts(argument, first, winner, loser, sizes):
    place = LEVELS.index(first)
    settings = {first: {argument: winner}} | {level: {argument: loser} for level in LEVELS[place + 1 :]}
    if argument != "num_assistant_tokens":
        settings["spec_config"] = settings.get("spec_config", {}) | {"num_assistant_tokens": 2}
    assert sizes_with(settings)[:3] == sizes


def test_the_defaults_when_nobody_sets_anything():
    assert sizes_with({})[:3] == [8, 8, 8]
