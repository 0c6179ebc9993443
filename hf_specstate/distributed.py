"""Speculative states and draft histories of several processes."""

from typing import TYPE_CHECKING

import torch

from .draft_history import DraftHistory
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
    return SpecStates.concatenate([from_bytes(data) for data in _gather(accelerator, to_bytes(states))])


def synchronize_draft_history(accelerator: "Accelerator", history: DraftHistory) -> None:
    """
    Gives the history of every process the texts of all of them, those of the first process as the oldest. All of them
    must call it.

    Args:
        accelerator (`Accelerator`): Of the script.
        history ([`DraftHistory`]): Of this process.
    """
    if accelerator.num_processes == 1:
        return
    parts = [DraftHistory.from_bytes(data) for data in _gather(accelerator, history.to_bytes())]
    history.replace(parts)


def _gather(accelerator: "Accelerator", own: bytes) -> list[bytes]:
    """What every process has, first process first."""
    data = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(accelerator.device)
    lengths = accelerator.gather(torch.tensor([data.numel()], device=accelerator.device)).tolist()
    gathered = accelerator.gather(accelerator.pad_across_processes(data)).cpu()
    parts = gathered.split(max(lengths))
    return [part[:length].numpy().tobytes() for part, length in zip(parts, lengths, strict=True)]
