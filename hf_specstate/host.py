"""The one place where the decoding loop reads from the device, and writes to it."""

from collections.abc import Sequence

import torch


def to_host(tensor: torch.Tensor) -> list:
    """
    Copies a small tensor to the host as (nested) Python numbers, waiting for the device.

    Every read that the decoding loop or a drafter makes goes through here, so that their number can be counted.
    """
    return tensor.tolist()


def from_host(values: Sequence, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor of (nested) Python numbers on `device`, whatever torch's default device is, without waiting for it."""
    return torch.tensor(values, dtype=dtype, device="cpu").to(device, non_blocking=True)
