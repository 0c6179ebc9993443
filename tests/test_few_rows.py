"""Faster products on the CPU: the same results, and nobody else notices."""

import copy
import threading

import pytest
import torch
from families import FAMILIES, prompt, tiny
from torch import nn
from torch.nn.functional import linear

import hf_specstate
from hf_specstate import few_rows
from hf_specstate.few_rows import MOST_ROWS, PRODUCTS, FewRowsLinear, few_rows_view

CONFIG = {"strict": True}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(few_rows, "_choices", {})


@pytest.fixture
def only(monkeypatch):
    """Makes one product win every measurement."""

    def choose(product):
        monkeypatch.setattr(few_rows, "_measure", lambda modules, rows: product)

    return choose


@pytest.mark.parametrize("product", PRODUCTS, ids=lambda product: product.__name__)
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 17, 64])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", few_rows.DTYPES, ids=str)
def test_products_agree(product, rows, bias, dtype):
    torch.manual_seed(0)
    module = nn.Linear(48, 80, bias=bias, dtype=dtype)
    x = torch.randn(rows, 48, dtype=dtype)
    expected = linear(x, module.weight, module.bias)
    found = product(x, module.weight.detach(), None if module.bias is None else module.bias.detach())
    assert found.shape == expected.shape and found.is_contiguous()
    exact = dtype == torch.float32
    torch.testing.assert_close(found, expected.detach(), rtol=1e-5 if exact else 0.02, atol=1e-5 if exact else 0.02)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("product", PRODUCTS, ids=lambda product: product.__name__)
def test_every_family_computes_the_same_through_its_view(only, family, product):
    only(product)
    model = tiny(family)
    view = few_rows_view(model)
    assert view is not None
    ids = prompt()
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})
    with torch.no_grad():
        expected, found = model(**inputs).logits, view(**inputs).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_the_view_uses_the_fast_product_and_shares_the_weights(only):
    calls = []

    def counted(x, weight, bias):
        calls.append(x.shape)
        return few_rows.weight_first(x, weight, bias)

    only(counted)
    model = tiny("llama")
    view = few_rows_view(model)
    with torch.no_grad():
        view(input_ids=prompt())
        linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
        assert len(calls) == len(linears)
        before = view(input_ids=prompt()).logits
        model.lm_head.weight.mul_(2)
        torch.testing.assert_close(view(input_ids=prompt()).logits, 2 * before)


def test_many_rows_are_left_to_torch(only):
    only(None)  # would raise if it were called
    model = tiny("llama")
    with torch.no_grad():
        few_rows_view(model)(input_ids=torch.ones((1, MOST_ROWS + 1), dtype=torch.long))


def snapshot(model) -> list:
    return [
        (name, type(module), id(module), dict(module.__dict__), list(module._modules.values()))
        for name, module in model.named_modules()
    ]


def test_the_model_is_untouched_even_when_a_call_is_interrupted(only):
    only(few_rows.weight_first)
    model = hf_specstate.enable(tiny("llama"))

    class Stop(Exception):
        pass

    seen = []

    def interrupt(module, args, output):
        seen.append(type(module))
        if len(seen) == 4:
            raise Stop

    hook = model.model.layers[1].mlp.register_forward_hook(interrupt)
    before = snapshot(model)
    with pytest.raises(Stop):
        model.generate(prompt(), max_new_tokens=20, spec_config=CONFIG)
    assert snapshot(model) == before
    assert not any(isinstance(module, FewRowsLinear) for module in model.modules())
    hook.remove()


def test_hooks_of_the_user_still_run(only):
    only(few_rows.weight_first)
    model, seen = hf_specstate.enable(tiny("llama")), []
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    out = model.generate(prompt(), max_new_tokens=12, spec_config=CONFIG, return_spec_states=True)
    assert len(seen) == out.spec_states[0].num_forwards


def test_hooks_are_handed_the_users_own_modules(only):
    """Which they may look up, or leave something on."""
    only(few_rows.weight_first)
    model = hf_specstate.enable(tiny("llama"))
    names = {module: name for name, module in model.named_modules()}
    seen: list[str] = []

    def count(module, *_):
        seen.append(names[module])
        module.calls = getattr(module, "calls", 0) + 1

    handles = [module.register_forward_hook(count) for module in names]
    handles += [
        module.register_forward_pre_hook(lambda module, args, kwargs: count(module), with_kwargs=True)
        for module in names
    ]
    options = dict(max_new_tokens=5, do_sample=False)
    model.generate(prompt(), **options)
    plain, layer = sorted(seen), model.model.layers[0]
    calls, layer.calls = layer.calls, 0
    seen.clear()
    model.generate(prompt(), spec_config=CONFIG | {"schedule": "constant", "max_nodes": 0}, **options)
    assert sorted(seen) == plain and layer.calls == calls
    for handle in handles:
        handle.remove()


def test_other_threads_see_torchs_own_product(monkeypatch):
    """While we generate with a product that is wrong, another thread uses the model and gets what it always gets."""
    slow, wrong = threading.Event(), threading.Event()

    def broken(x, weight, bias):
        wrong.set()
        slow.wait(10)
        return torch.zeros(x.shape[0], weight.shape[0], dtype=x.dtype)

    monkeypatch.setattr(few_rows, "_measure", lambda modules, rows: broken)
    model = hf_specstate.enable(tiny("llama"))
    with torch.no_grad():
        expected = model(prompt()).logits
    thread = threading.Thread(
        target=model.generate, args=(prompt(),), kwargs=dict(max_new_tokens=4, spec_config=CONFIG)
    )
    thread.start()
    assert wrong.wait(10)
    with torch.no_grad():
        found = model(prompt()).logits
    slow.set()
    thread.join()
    assert torch.equal(found, expected)


def test_can_be_switched_off(only):
    only(None)
    model, plain = hf_specstate.enable(tiny("llama")), tiny("llama")
    out = model.generate(prompt(), max_new_tokens=12, spec_config={"few_rows": False})
    assert out.tolist() == plain.generate(prompt(), max_new_tokens=12).tolist()


def test_nothing_is_done_where_weights_are_not_dense():
    class Packed(nn.Linear):
        """As quantised modules are: a subclass."""

    model = tiny("llama")
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Packed
    assert few_rows_view(model) is None
    half = tiny("llama").to(torch.float16)
    assert few_rows_view(half) is None
    offloaded = tiny("llama")
    offloaded.model.layers[0]._hf_hook = object()  # as accelerate marks modules whose weights it moves
    assert few_rows_view(offloaded) is None


def test_only_dense_modules_of_a_model_change(only):
    only(few_rows.weight_first)
    model = tiny("llama")
    parametrized = model.model.layers[0].mlp.up_proj
    nn.utils.parametrize.register_parametrization(parametrized, "weight", nn.Identity())
    odd = model.model.layers[0].mlp.down_proj
    odd.forward = lambda x: x[..., : odd.out_features] * 0  # as libraries that wrap a module do
    view = few_rows_view(model)
    kinds = {name: type(module) for name, module in view._model.named_modules()}
    assert kinds["model.layers.0.mlp.up_proj"] is type(parametrized)
    assert kinds["model.layers.0.mlp.down_proj"] is nn.Linear
    assert kinds["model.layers.1.mlp.down_proj"] is FewRowsLinear


def test_what_has_a_forward_of_its_own_keeps_it(only):
    """Libraries replace the method on the object; it is bound to that object and would go past the view."""
    only(few_rows.weight_first)
    model, seen = hf_specstate.enable(tiny("llama")), []
    layer = model.model.layers[0]
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: seen.append(1) or forward(*args, **kwargs)
    view = few_rows_view(model)._model
    assert view.model.layers[0] is layer and view.model.layers[1] is not model.model.layers[1]
    out = model.generate(prompt(), max_new_tokens=12, spec_config=CONFIG, return_spec_states=True)
    assert len(seen) == out.spec_states[0].num_forwards
    model.forward = model.forward
    assert few_rows_view(model) is None


def test_a_product_must_win_clearly(monkeypatch):
    seconds = {"linear": 1.0, "weight_first": 0.95, "one_dnn": 1.2}
    monkeypatch.setattr(few_rows, "_seconds", lambda product, x, weights: seconds[product.__name__])
    assert few_rows._measure([nn.Linear(8, 8)], 2) is linear
    seconds["one_dnn"] = 0.5
    assert few_rows._measure([nn.Linear(8, 8)], 2) is few_rows.one_dnn


def test_a_product_that_torch_lacks_is_passed_over(monkeypatch):
    def missing(x, weight, bias):
        raise AttributeError("no such operator")

    monkeypatch.setattr(few_rows, "PRODUCTS", (missing,))
    assert few_rows._measure([nn.Linear(8, 8)], 2) is linear


def test_measured_once_for_a_shape_and_number_of_rows(monkeypatch):
    measured = []
    monkeypatch.setattr(few_rows, "_measure", lambda modules, rows: measured.append(rows) or linear)
    model = tiny("llama")
    for view in (few_rows_view(model), few_rows_view(copy.deepcopy(model))):
        for rows in (3, 4, 4, 3):
            view.prepare(rows)
    shapes = {module.weight.shape for module in model.modules() if isinstance(module, nn.Linear)}
    assert measured == [4] * len(shapes)
