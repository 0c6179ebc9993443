"""A view of a model that leaves after its first layers, without touching the model."""

import copy

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
    text_config.num_hidden_layers = num_layers
    for name in ("layer_types", "mlp_layer_types"):
        if getattr(text_config, name, None):
            setattr(text_config, name, getattr(text_config, name)[:num_layers])
    view, found = _view(model, config, total, num_layers)
    if not found:
        raise ValueError(f"`assistant_early_exit`: no list of {total} decoder layers found in {type(model).__name__}.")
    return view


def _view(module: nn.Module, config, total: int, num_layers: int) -> tuple[nn.Module, bool]:
    """A shallow copy of the modules on the way down to the layer list; everything else is shared."""
    view = copy.copy(module)
    view._modules = dict(module._modules)
    # accelerate's hooks replace `forward` on the instance, bound to the original; those of the submodules stay in place
    view.__dict__.pop("forward", None)
    if getattr(view, "config", None) is not None:
        view.config = config if view.config is not None and hasattr(config, "get_text_config") else view.config
    for name, child in module._modules.items():
        if isinstance(child, nn.ModuleList) and len(child) == total:
            view._modules[name] = nn.ModuleList(list(child)[:num_layers])
            return view, True
        if isinstance(child, nn.Module) and any(
            isinstance(inner, nn.ModuleList) and len(inner) == total for inner in child.modules()
        ):
            view._modules[name], found = _view(child, config, total, num_layers)
            if found:
                return view, True
    return view, False
