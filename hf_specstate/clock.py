"""Telling how long parts of a generation took, without waiting for the device."""

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Marks points in time, and tells later how many seconds lie between two of them."""

    def mark(self) -> Any: ...

    def seconds(self, start: Any, end: Any) -> float: ...


class HostClock:
    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start


class StoppedClock:
    """When nobody asks."""

    def mark(self) -> None:
        return None

    def seconds(self, start: None, end: None) -> float:
        return 0.0


class CudaClock:
    """
    Events in the stream of `device`: waiting for the GPU at every mark would slow down what is being measured.
    """

    def __init__(self, device: torch.device):
        self._device = device

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def make_clock(device: torch.device) -> Clock:
    """The clock for work on `device`."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
