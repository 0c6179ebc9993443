"""What a forward of several tokens costs on this machine, compared with one of a single token."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from hf_specstate.clock import make_clock

from .models import device_of

CONTEXT = 300  # tokens in the cache
ROWS = (1, 4)
TOKENS = range(1, 33)
REPEATS = 11


def cost_curve(
    model: PreTrainedModel,
    known: set[tuple[int, int]],
    repeats: int = REPEATS,
    tokens: Sequence[int] = TOKENS,
    all_rows: Sequence[int] = ROWS,
    call: Callable[..., Any] | None = None,
) -> Iterator[dict[str, Any]]:
    """
    Times forwards as verification makes them: with logits for every token, on a filled cache. Each size is timed once
    in every round of repeats, so that a slow moment does not fall on one size alone.

    Args:
        model (`PreTrainedModel`): The target.
        known (`set[tuple[int, int]]`): Rows and tokens that need not be timed.
        repeats (`int`): Rounds; the median counts.
        tokens (`list[int]`), all_rows (`list[int]`): Sizes.
        call (`Callable`, *optional*): Makes the forwards, if not the model itself.

    Yields:
        `dict`: A `cost_curve` line for every size.
    """
    for rows in all_rows:
        sizes = [size for size in tokens if (rows, size) not in known]
        if not sizes:
            continue
        timed = _Forwards(model, rows, call or model)
        seconds: dict[int, list[float]] = {size: [] for size in sizes}
        for repeat in tqdm(range(repeats + 1), desc=f"cost of forwards, {rows} row(s)", leave=False):
            for size in sizes:
                took = timed.forward(size)
                if repeat:  # the first round warms up
                    seconds[size].append(took)
        for size, values in seconds.items():
            record = {"type": "cost_curve", "rows": rows, "tokens": size, "context": CONTEXT}
            yield record | {"seconds": round(statistics.median(values), 6)}


class _Forwards:
    """Forwards on one cache, which is cut back after each of them."""

    def __init__(self, model: PreTrainedModel, rows: int, call: Callable[..., Any]):
        self._call = call
        self._device = device_of(model)
        self._clock = make_clock(self._device)
        vocab_size = model.config.get_text_config(decoder=True).vocab_size
        generator = torch.Generator().manual_seed(0)
        shape = (rows, CONTEXT + max(TOKENS))
        self._ids = torch.randint(vocab_size, shape, generator=generator).to(self._device)
        with torch.no_grad():
            outputs = model(input_ids=self._ids[:, :CONTEXT], use_cache=True, logits_to_keep=1)
        # its name depends on the version of transformers
        self._name = "cache" if "cache" in outputs else "past_key_values"
        self._cache = outputs[self._name]

    @torch.no_grad()
    def forward(self, tokens: int) -> float:
        ids = self._ids[:, CONTEXT : CONTEXT + tokens]
        start = self._clock.mark()
        self._call(input_ids=ids, use_cache=True, **{self._name: self._cache})
        end = self._clock.mark()
        self._cache.crop(-tokens)
        return self._clock.seconds(start, end)
