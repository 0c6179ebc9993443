"""Counts and times one `generate` call by wrapping the calls that matter for as long as it lasts."""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import psutil
import torch

from hf_specstate.clock import make_clock

Watched = list[tuple[Any, str]]  # (object or class, name of its method; of a model, `forward`)


@dataclass
class Calls:
    """
    The calls of a method that are watched. Time counts for the outermost one: a forward of the assistant within a
    drafting call is drafting.

    Args:
        target (`list[tuple]`): Forwards of the target. The first one of a generation is its prefill.
        head (`list[tuple]`): Work of the target outside these calls; timed with the forward before it.
        draft (`list[tuple]`): Calls that make drafts.
        assistant (`list[tuple]`): Forwards of an assistant.
    """

    target: Watched
    head: Watched = field(default_factory=list)
    draft: Watched = field(default_factory=list)
    assistant: Watched = field(default_factory=list)


@dataclass
class Cost:
    """
    What one call cost.

    Args:
        seconds (`dict[str, float]`): `total`, and its parts `prefill`, `draft`, `verify` and `other`.
        target_forwards (`int`): Forwards of the target, the prefill included.
        assistant_forwards (`int`): Forwards of the assistant, its prefill included.
        verified_nodes (`int`): Drafted tokens that the target's forwards carried for each row, padding included.
        prefill_tokens (`int`): New tokens that the prefill gave.
        peak_memory_bytes (`int`): On a GPU the most that torch held there, else the process's largest resident size.
    """

    seconds: dict[str, float]
    target_forwards: int
    assistant_forwards: int
    verified_nodes: int
    prefill_tokens: int
    peak_memory_bytes: int

    def tokens_per_forward(self, new_tokens: int) -> float | None:
        """
        Tokens that a target forward gave on average. The prefill and what it gave are left out: it is round 0, and
        plain decoding makes it too. That is `(new_tokens - 1) / (target_forwards - 1)`, unless a method drafts for the
        prefill already (its accepted tokens are left out as well) or leaves the last prompt token to the first round
        (which then gave them all). None without a round.
        """
        rounds = self.target_forwards - 1
        return (new_tokens - self.prefill_tokens) / rounds if rounds > 0 else None


class Meter:
    """
    Watches one generation.

    Args:
        device (`torch.device`): Of the target.
        prompt_width (`int`): Tokens of the (padded) prompt.
    """

    def __init__(self, device: torch.device, prompt_width: int):
        self._device = device
        self._prompt_width = prompt_width
        self._clock = make_clock(device)
        self._spans: list[tuple[str, Any, Any]] = []
        self._is_inside = False
        self._target_forwards = self._assistant_forwards = self._verified_nodes = 0
        self._prefill_tokens = 1
        self._process = psutil.Process()
        self._peak_memory = 0

    @contextmanager
    def watching(self, calls: Calls) -> Iterator[None]:
        """While it is open, the calls are counted and timed; afterwards everything is as it was."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        start = self._now()
        with ExitStack() as stack:
            for kind in ("target", "head", "draft", "assistant"):
                for owner, name in getattr(calls, kind):
                    stack.enter_context(self._patched(kind, owner, name))
            yield
        self._total = self._now() - start

    def cost(self) -> Cost:
        seconds = dict.fromkeys(("prefill", "draft", "verify"), 0.0)
        for part, start, end in self._spans:
            seconds[part] += self._clock.seconds(start, end)
        other = max(0.0, self._total - sum(seconds.values()))
        return Cost(
            {"total": self._total, **seconds, "other": other},
            self._target_forwards,
            self._assistant_forwards,
            self._verified_nodes,
            self._prefill_tokens,
            torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else self._peak_memory,
        )

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _patched(self, kind: str, owner: Any, name: str) -> AbstractContextManager:
        if not isinstance(owner, torch.nn.Module):
            return patch.object(owner, name, self._watched(kind, getattr(owner, name)))
        # In the class: a method of the object itself would stay with that object, and forwards may go through a view
        # of the model. Whose they are is told by the config, which a view shares.
        original = getattr(type(owner), name)
        watched = self._watched(kind, original, skipped=1)

        @functools.wraps(original)
        def wrapper(module, *args, **kwargs):
            return (watched if module.config is owner.config else original)(module, *args, **kwargs)

        return patch.object(type(owner), name, wrapper)

    def _watched(self, kind: str, function: Callable, skipped: int = 0) -> Callable:
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            self._count(kind, args[skipped:], kwargs)
            if self._is_inside:
                return function(*args, **kwargs)
            self._is_inside = True
            start = self._clock.mark()
            try:
                return function(*args, **kwargs)
            finally:
                self._spans.append((self._part(kind), start, self._clock.mark()))
                self._is_inside = False
                if kind == "target" and self._device.type != "cuda":  # when a forward's activations are still there
                    self._peak_memory = max(self._peak_memory, self._process.memory_info().rss)

        return wrapper

    def _part(self, kind: str) -> str:
        if kind in ("draft", "assistant"):
            return "draft"
        return "prefill" if self._target_forwards <= 1 else "verify"

    def _count(self, kind: str, args: tuple, kwargs: dict[str, Any]) -> None:
        if kind == "assistant":
            self._assistant_forwards += 1
        if kind != "target":
            return
        self._target_forwards += 1
        inputs = (kwargs.get("input_ids"), *args)
        width = next(value.shape[1] for value in inputs if isinstance(value, torch.Tensor))
        # A prefill may carry a draft behind the prompt; a later forward carries the last token and the draft.
        self._verified_nodes += max(0, width - (self._prompt_width if self._target_forwards == 1 else 1))
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        if self._target_forwards == 2 and cache is not None:
            # everything but the last new token is in the cache by then
            self._prefill_tokens = int(cache.get_seq_length()) + 1 - self._prompt_width
