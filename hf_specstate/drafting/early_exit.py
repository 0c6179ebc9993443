"""A view of a model that leaves after its first layers, without touching the model."""

import copy
from typing import Any

from torch import nn
from transformers import PreTrainedModel


def early_exit_view(model: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """
    A model that shares every module and weight with `model` but runs only its first `num_layers` decoder layers. The
    model itself and its config stay as they are, so others may use it meanwhile (LayerSkip,
    https://huggingface.co/papers/2404.16710).

    Raises:
        ValueError: the model has no list of decoder layers, or not more than `num_layers` of them.
    """
    config = copy.deepcopy(model.config)
    text_config = config.get_text_config(decoder=True)
    total = text_config.num_hidden_layers
    if not 0 < num_layers < total:
        raise ValueError(f"`assistant_early_exit` must lie between 1 and {total - 1} for this model, got {num_layers}.")
    decoder = model.get_decoder()
    lists = [name for name, child in decoder.named_children() if isinstance(child, nn.ModuleList)]
    lists = [name for name in lists if len(getattr(decoder, name)) == total]
    if not lists:
        raise ValueError(f"`assistant_early_exit`: no list of {total} decoder layers found in {type(model).__name__}.")
    text_config.num_hidden_layers = num_layers
    for name in ("layer_types", "mlp_layer_types"):
        if getattr(text_config, name, None):
            setattr(text_config, name, getattr(text_config, name)[:num_layers])
    configs = {id(model.config): config, id(model.config.get_text_config(decoder=True)): text_config}
    shortened = _shallow_copy(decoder, configs)
    for name in lists:
        shortened._modules[name] = nn.ModuleList(list(getattr(decoder, name))[:num_layers])
    return _with_part(model, decoder, shortened, configs)


def _with_part(module: nn.Module, part: nn.Module, replacement: nn.Module, configs: dict[int, Any]) -> Any:
    """`module` with one module inside it replaced; copies the modules on the way down and shares everything else."""
    if module is part:
        return replacement
    view = _shallow_copy(module, configs)
    for name, child in module._modules.items():
        if child is not None and any(inner is part for inner in child.modules()):
            view._modules[name] = _with_part(child, part, replacement, configs)
    return view


def _shallow_copy(module: nn.Module, configs: dict[int, Any]) -> nn.Module:
    view = copy.copy(module)
    view._modules = dict(module._modules)
    # accelerate's hooks replace `forward` on the instance, bound to the original; those of the submodules stay in place
    view.__dict__.pop("forward", None)
    if "config" in view.__dict__:
        view.__dict__["config"] = configs.get(id(view.config), view.config)
    return view
