"""The one place where the decoding loop reads from the device."""

import torch


def to_host(tensor: torch.Tensor) -> list:
    """
    Copies a small tensor to the host as (nested) Python numbers, waiting for the device.

    Every read that the decoding loop or a drafter makes goes through here, so that their number can be counted.
    """
    return tensor.tolist()
