"""One decision on all ranks that share a model."""

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from ..compat import tp_size

Agree = Callable[[list[float]], list[float]]


def agreement(model: PreTrainedModel) -> Agree | None:
    """
    Under tensor parallelism every rank must run the same forwards, but clocks differ. So all go by the first rank's:
    the function returned gives its numbers to all of them. Everything else that decides is the same on all ranks.
    None for a model that one process holds.
    """
    if tp_size(model) < 2:
        return None
    mesh, group = getattr(model, "_device_mesh", None), None
    if mesh is not None and "tp" in (mesh.mesh_dim_names or ()):  # beside it there may be replicas with other texts
        group = mesh["tp"].get_group()
    first = 0 if group is None else torch.distributed.get_global_rank(group, 0)

    def agree(numbers: list[float]) -> list[float]:
        device = "cpu" if torch.distributed.get_backend(group) == "gloo" else model.device
        shared = torch.tensor(numbers, dtype=torch.float64, device=device)
        torch.distributed.broadcast(shared, src=first, group=group)
        return shared.tolist()

    return agree
