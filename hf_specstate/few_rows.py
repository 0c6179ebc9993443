"""
Faster products for the few rows of a verification on the CPU.

`torch.nn.functional.linear` is tuned for one row or for many: on some machines 2 to 64 rows take several times as long
as other ways to multiply the same matrices, which differ in the last bits only. Which way is fastest depends on the
machine, the shape and the number of rows, so it is measured on the model's own weights when it is first needed.

The model is left alone: forwards go through a *view* of it, which shares all weights, buffers and hooks but has other
linear modules. No other thread sees it, and nothing has to be put back when a call is interrupted. (What a module's own
`forward` writes into its attributes, rather than into buffers, stays on the view and is gone with it.)
"""

import time
from collections.abc import Callable, Iterator, MutableMapping
from threading import Lock
from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from .compat import tp_size

MOST_ROWS = 64
DTYPES = (torch.float32, torch.bfloat16)
TIMED_BYTES = 2**26  # of weights of one shape: more than processors cache, as in a forward
WORTHWHILE = 0.9  # of the usual product's time, from which another one is used

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def weight_first(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`(W xᵀ)ᵀ`: the large matrix on the left."""
    product = torch.mm(weight, x.t()).t().contiguous()
    return product if bias is None else product.add_(bias)


def one_dnn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """oneDNN's product, by the operator that `torch.compile` uses for linear layers on the CPU."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


# beside `linear`, which torch uses
PRODUCTS: tuple[Product, ...] = (weight_first, one_dnn)

_choices: dict[tuple, Product] = {}  # (shape, dtype, threads, rows at most) -> the fastest
_lock = Lock()


class AlikeLinears:
    """
    The linear modules of a model whose weights have the same shape, and the fastest product for each number of rows.

    Args:
        modules (`list[nn.Linear]`): The model's own.
    """

    def __init__(self, modules: list[nn.Linear]):
        self._modules = modules
        self._products: dict[int, Product] = {}

    def product(self, rows: int) -> Product:
        """For `rows` rows; the first time, a measurement of some milliseconds that the process remembers."""
        product = self._products.get(rows)
        if product is None:
            product = self._products[rows] = _fastest_product(self._modules, rows) if rows <= MOST_ROWS else linear
        return product


class FewRowsLinear(nn.Linear):
    """A linear module of a view."""

    alike: AlikeLinears

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = input.numel() // self.in_features
        is_plain = rows and input.dtype == self.weight.dtype and not torch.is_autocast_enabled("cpu")
        product = self.alike.product(rows) if is_plain else linear
        if product is linear:
            return linear(input, self.weight, self.bias)
        return product(input.reshape(rows, -1), self.weight, self.bias).reshape(*input.shape[:-1], -1)


class FewRowsView:
    """
    A model with faster products.

    Args:
        model (`PreTrainedModel`): Left as it is.
        groups (`dict[tuple, list[nn.Linear]]`): Its dense linear modules, by what their weights are like.
    """

    def __init__(self, model: PreTrainedModel, groups: dict[tuple, list[nn.Linear]]):
        self._groups = {kind: AlikeLinears(modules) for kind, modules in groups.items()}
        self._model = _view(model, self._groups, {})

    def prepare(self, rows: int) -> None:
        """Finds the products for `rows` rows, so that no forward takes the time for it."""
        for alike in self._groups.values():
            alike.product(rows)

    def __call__(self, *args, **kwargs):
        """A forward of the model."""
        return self._model(*args, **kwargs)


def few_rows_view(model: PreTrainedModel) -> FewRowsView | None:
    """
    The model with faster products. None where there is nothing to gain: without dense float32 or bfloat16 `nn.Linear`
    modules on the CPU, or with weights that accelerate moves about; and under tensor parallelism, where ranks with
    different products would come to different tokens.
    """
    if tp_size(model) > 1:
        return None
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        return None
    groups: dict[tuple, list[nn.Linear]] = {}
    for module in model.modules():
        if _is_dense(module):
            groups.setdefault(_kind(module.weight), []).append(module)
    if not groups or "forward" in model.__dict__:
        return None
    return FewRowsView(model, groups)


def _fastest_product(modules: list[nn.Linear], rows: int) -> Product:
    most = 1 << (rows - 1).bit_length()  # 1, 2, 4, 8 ... decide for the numbers up to them
    key = (*_kind(modules[0].weight), torch.get_num_threads(), most)
    product = _choices.get(key)
    if product is None:
        with _lock:
            if key not in _choices:
                _choices[key] = _measure(modules, most)
            product = _choices[key]
    return product


def _measure(modules: list[nn.Linear], rows: int) -> Product:
    weight = modules[0].weight
    row_bytes = weight.shape[1] * weight.element_size()
    outputs = max(1, TIMED_BYTES // row_bytes)  # a part will do of a large one, such as a language head
    count = max(1, TIMED_BYTES // (weight.shape[0] * row_bytes))
    weights = [module.weight.detach()[:outputs] for module in modules[:count]]
    x = weight.new_ones((rows, weight.shape[1]))
    fastest: Product = linear
    least = WORTHWHILE * _seconds(linear, x, weights)
    for product in PRODUCTS:
        try:
            seconds = _seconds(product, x, weights)
        except (RuntimeError, AttributeError, NotImplementedError):
            continue  # this build of torch does not have it
        if seconds < least:
            fastest, least = product, seconds
    return fastest


def _seconds(product: Product, x: torch.Tensor, weights: list[torch.Tensor]) -> float:
    product(x, weights[0], None)  # the first call makes the kernel
    passes = []
    for _ in range(2):
        start = time.perf_counter()
        for weight in weights:
            product(x, weight, None)
        passes.append(time.perf_counter() - start)
    return min(passes)


def _is_dense(module: nn.Module) -> bool:
    """Whether this is a linear module as torch made it: not quantised, not parametrised, not on another device."""
    if type(module) is not nn.Linear or "forward" in module.__dict__:
        return False
    weight = module.weight
    # a tensor subclass (of quantisation, of sharding) has products of its own
    return type(weight) is nn.Parameter and weight.device.type == "cpu" and weight.dtype in DTYPES


def _kind(weight: torch.Tensor) -> tuple:
    return (tuple(weight.shape), weight.dtype, weight.stride())


class OwnersHooks(MutableMapping):
    """
    The hooks of a module, called with that module where its view runs: a hook may look it up, or leave something on it.

    Args:
        owner (`nn.Module`): The module.
        hooks (`MutableMapping`): Its hooks; what is registered on the view is registered there.
    """

    def __init__(self, owner: nn.Module, hooks: MutableMapping[int, Callable]):
        self._owner, self._hooks = owner, hooks

    def __getitem__(self, key: int) -> Callable:
        hook = self._hooks[key]
        return lambda view, *args: hook(self._owner, *args)

    def __setitem__(self, key: int, hook: Callable) -> None:
        self._hooks[key] = hook

    def __delitem__(self, key: int) -> None:
        del self._hooks[key]

    def __iter__(self) -> Iterator[int]:
        return iter(self._hooks)

    def __len__(self) -> int:
        return len(self._hooks)


def _view(module: nn.Module, groups: dict[tuple, AlikeLinears], made: dict[int, nn.Module]) -> Any:
    """Copies the modules that change and those around them, each once, but nothing that they hold."""
    if id(module) in made:
        return made[id(module)]
    children = {name: None if child is None else _view(child, groups, made) for name, child in module._modules.items()}
    is_dense = _is_dense(module)
    is_same = all(view is module._modules[name] for name, view in children.items())
    if not is_dense and (is_same or "forward" in module.__dict__):  # an object's own forward would go on with its own
        made[id(module)] = module
        return module
    view = made[id(module)] = object.__new__(FewRowsLinear if is_dense else type(module))
    view.__dict__.update(module.__dict__, _modules=children)
    for kind in ("_forward_pre_hooks", "_forward_hooks"):
        if hooks := module.__dict__[kind]:  # few have any, and a dict is faster
            view.__dict__[kind] = OwnersHooks(module, hooks)
    if is_dense:
        view.__dict__["alike"] = groups[_kind(cast(nn.Linear, module).weight)]
    return view
