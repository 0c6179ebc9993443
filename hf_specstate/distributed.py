"""Speculative states of several processes."""

from typing import TYPE_CHECKING

import torch

from .state_files import from_bytes, to_bytes
from .states import SpecStates

if TYPE_CHECKING:
    from accelerate import Accelerator


def gather_spec_states(accelerator: "Accelerator", states: SpecStates) -> SpecStates:
    """
    The rows of all processes, first process first, on every process. All of them must call it. The states travel as
    bytes in tensors, without pickle.

    Args:
        accelerator (`Accelerator`): Of the script.
        states ([`SpecStates`]): Of this process; may be empty, `SpecStates()`.
    """
    if accelerator.num_processes == 1:
        return states
    data = torch.frombuffer(bytearray(to_bytes(states)), dtype=torch.uint8).to(accelerator.device)
    lengths = accelerator.gather(torch.tensor([data.numel()], device=accelerator.device)).tolist()
    gathered = accelerator.gather(accelerator.pad_across_processes(data)).cpu()
    parts = gathered.split(max(lengths))
    return SpecStates.concatenate(
        [from_bytes(part[:length].numpy().tobytes()) for part, length in zip(parts, lengths, strict=True)]
    )
