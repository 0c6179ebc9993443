"""
KV rows of one model: which cache slot holds which token of which row, and how slots are kept, dropped and moved.

A cache of transformers grows by the same number of slots in every row and layer. Rows that accept different numbers of
tokens therefore need one of two layouts:

- *holes*: the accepted slots of a round are moved together, the rest is cropped down to the longest row, and shorter
  rows hide the difference behind the attention mask. Only the last few slots are ever touched; when more than a
  quarter of the slots is waste, the rows are compacted.
- *aligned*: every row is shifted to the right end of the cache after each ragged round, as left padding would place
  it. Needed where the distance between slots matters (sliding windows, position biases computed from slots).
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from .compat import self_attention_cache
from .host import from_host, to_host

WASTE_BEFORE_COMPACTION = 0.25  # fraction of slots; a compaction copies the whole cache once, like any forward does
STATIC_WIDTHS = (1, 2, 4, 8, 16)  # static caches are made for compiled forwards, which compile once for each width
GATHERABLE_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)


class RowCache:
    """
    Args:
        cache (`Cache`): The model's cache after its prefill; used in place.
        visible (`torch.BoolTensor` of shape `(batch_size, slots)`): False marks the padding of the prompt.
        aligned (`bool`): The layout for ragged rows, see above.
    """

    def __init__(self, cache: Cache, visible: torch.Tensor, aligned: bool):
        self.cache = cache
        self.aligned = aligned
        self.visible = visible
        batch_size, self.slots = visible.shape
        self.lengths = [self.slots] * batch_size  # tokens of each row, prompt padding included
        self.index = torch.arange(self.slots, device=visible.device).repeat(batch_size, 1)  # place in the row; -1: hole
        # slots behind `slots` that the last forwards wrote and `keep` has not judged, and their places in the rows
        self.pending_place = self.index[:, :0]
        self.is_dense: bool = to_host(visible.all()[None])[0]
        self._marks = CacheMarks(cache)
        self._layers = [layer for layer in self_attention_cache(cache).layers if _holds_states(layer)]
        self._recording = [getattr(layer, "record_past", None) for layer in self._layers]
        cache.activate_past_recording()
        self._crop(0)

    @property
    def pending(self) -> int:
        return self.pending_place.shape[1]

    @property
    def sliding_layer(self) -> CacheLayerMixin | None:
        """A layer that holds only its window; None where all hold everything, as in a cache made without a config."""
        return next((layer for layer in self._layers if getattr(layer, "is_sliding", False)), None)

    @property
    def room(self) -> int | None:
        """Slots that a static cache still has; None where a cache grows."""
        static = [layer for layer in self._layers if isinstance(layer, StaticLayer)]
        return min(layer.max_cache_len for layer in static) - self.slots - self.pending if static else None

    # ------------------------------------------------------------------ around a forward

    def begin(self) -> None:
        """Call it before a forward, so that it can be undone."""
        self._marks = CacheMarks(self.cache)

    def rollback(self) -> None:
        """Undoes an interrupted forward: every layer is as `begin` found it."""
        self._marks.restore()

    def end(self, place: torch.Tensor) -> None:
        """A forward has written slots for the tokens at `place`, of shape `(batch_size, width)`."""
        self.pending_place = torch.cat([self.pending_place, place], dim=1)

    # ------------------------------------------------------------------ after the walk

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """
        Keeps some of the slots written since the last `keep` and drops the others.

        Args:
            paths (`list[list[int]]`): For each row the slots to keep, in order, counted from the first pending one.
        """
        longest = max(len(path) for path in paths)
        ragged = any(len(path) != longest for path in paths)
        if ragged and self.aligned:
            self._append(paths, self.pending, scattered=True)
            self._compact()
        else:
            if any(slot != place for path in paths for place, slot in enumerate(path)):
                self._gather_tail(paths, longest)
            self._crop(self.pending - longest)
            self._append(paths, longest, scattered=False)
            if self.slots - max(self.lengths) > WASTE_BEFORE_COMPACTION * self.slots:
                self._compact()

    def finalize(self, length: int | None = None) -> None:
        """
        Leaves the cache as plain decoding would: slot `i` of a row holds token `i`; zeros behind rows that ended.

        Args:
            length (`int`, *optional*):
                Slots to keep. Defaults to the longest row's. Sliding layers cannot go back to fewer: what a longer row
                would need again has left the window.
        """
        if self.pending:  # an exception came between a forward and its verdict
            self.keep([[] for _ in self.lengths])
        if length is None or self.sliding_layer is not None:
            length = max(self.lengths)
        if any(rows != self.slots for rows in (length, *self.lengths)):
            order = self._order()
            places = torch.arange(length, device=order.device)
            ends = torch.tensor(self.lengths, device=order.device)[:, None]
            source = order.gather(1, (self.slots - ends + places).clamp(max=self.slots - 1))
            self._gather_slots(source, empty=places >= ends)
        for layer, recording in zip(self._layers, self._recording, strict=True):
            if recording is not None:
                layer.record_past = recording

    # ------------------------------------------------------------------ the parts

    def _append(self, paths: Sequence[Sequence[int]], width: int, scattered: bool) -> None:
        """Notes `width` pending slots as kept: slot `j` is the `j`-th of a path, or, if scattered, the one it names."""
        index = torch.full((len(paths), width), -1, device="cpu")
        for row, path in enumerate(paths):
            for place, slot in enumerate(path):
                index[row, slot if scattered else place] = self.lengths[row] + place
            self.lengths[row] += len(path)
        index = index.to(self.index.device, non_blocking=True)
        self.index = torch.cat([self.index, index], dim=1)
        self.visible = torch.cat([self.visible, index >= 0], dim=1)
        self.slots += width
        self.pending_place = self.index[:, :0]
        self.is_dense = self.is_dense and all(len(path) == width for path in paths)

    def _order(self) -> torch.Tensor:
        """`(batch_size, slots)`: every row's slots sorted by place, holes first."""
        return self.index.argsort(dim=1, stable=True)

    def _compact(self) -> None:
        """Moves every row to the right end of the shortest cache that holds the longest row."""
        length = max(self.lengths)
        source = self._order()[:, self.slots - length :]
        starts = torch.tensor([length - rows for rows in self.lengths], device=source.device)[:, None]
        empty = torch.arange(length, device=source.device) < starts
        index = self.index.gather(1, source).masked_fill(empty, -1)
        visible = self.visible.gather(1, source) & ~empty
        self._gather_slots(source, empty)
        self.index, self.visible = index, visible

    def _gather_slots(self, source: torch.Tensor, empty: torch.Tensor) -> None:
        """New slot `i` of a row is its old slot `source[row, i]`, or zeros where `empty`; the only whole-cache copy."""
        for layer in self._layers:
            where, blank = source.to(layer.keys.device), empty.to(layer.keys.device)
            if isinstance(layer, DynamicSlidingWindowLayer):
                held = layer.keys.shape[-2]  # such a layer holds only the last slots
                window = layer.sliding_window - 1
                where, blank = (where[:, -window:] - (self.slots - held)).clamp(min=0), blank[:, -window:]
                layer.cumulative_length = source.shape[1]
            keys, values = (_gather(states, where, blank) for states in (layer.keys, layer.values))
            if isinstance(layer, StaticLayer):
                layer.keys[:, :, : keys.shape[2]] = keys
                layer.values[:, :, : values.shape[2]] = values
                _set_static_length(layer, source.shape[1])
            else:
                layer.keys, layer.values = keys, values
        self.slots = source.shape[1]

    def _gather_tail(self, paths: Sequence[Sequence[int]], longest: int) -> None:
        """Moves the kept slots of every row to the front of the pending ones, in place."""
        source = from_host([[*path, *[0] * (longest - len(path))] for path in paths])
        for layer in self._layers:
            where = source.to(layer.keys.device, non_blocking=True)
            for states in (layer.keys, layer.values):
                end = self.slots + self.pending if isinstance(layer, StaticLayer) else states.shape[-2]
                tail = states[:, :, end - self.pending : end]
                tail[:, :, :longest] = _gather(tail, where)

    def _crop(self, slots: int) -> None:
        """Drops the last `slots` slots. Sliding layers need this call after every forward, even for nothing."""
        for layer in self._layers:
            if isinstance(layer, StaticLayer):
                _set_static_length(layer, self.slots + self.pending - slots)
            else:
                layer.crop(-slots)


def forward_width(width: int, fixed_slots: bool) -> int:
    """Slots of each row in a forward over `width` tokens: on static caches one of `STATIC_WIDTHS` where it may be."""
    if not fixed_slots:
        return width
    return next((rounded for rounded in STATIC_WIDTHS if rounded >= width), width)


def has_fixed_slots(cache: Cache) -> bool:
    """
    Whether `cache` has a fixed number of slots. A row that ended ahead of the others then fills the slots that they
    need: rows must advance together.
    """
    return any(isinstance(layer, StaticLayer) for layer in self_attention_cache(cache).layers)


def can_gather(cache: Cache) -> bool:
    """Whether the slots of every layer of `cache` can be moved by row."""
    layers = self_attention_cache(cache).layers
    return all(type(layer) in GATHERABLE_LAYERS for layer in layers if _holds_states(layer))


def _holds_states(layer) -> bool:
    """Layers that share another layer's states, or have none, stay empty."""
    return getattr(layer, "keys", None) is not None or any(getattr(layer, "is_conv_states_initialized", {}).values())


def _gather(states: torch.Tensor, source: torch.Tensor, empty: torch.Tensor | None = None) -> torch.Tensor:
    """`states` of shape `(batch_size, heads, slots, head_dim)`, picked by `source` `(batch_size, new_slots)`."""
    where = source[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
    picked = states.gather(2, where)
    return picked if empty is None else picked.masked_fill_(empty[:, None, :, None], 0)


def _set_static_length(layer: StaticLayer, slots: int) -> None:
    layer.cumulative_length.fill_(slots)
    if isinstance(layer, StaticSlidingWindowLayer):
        layer.cumulative_length_int = slots


class CacheMarks:
    """What the layers of a cache hold, so that a forward that is interrupted between two layers can be undone."""

    def __init__(self, cache: Cache):
        self._layers = self_attention_cache(cache).layers
        self._marks = [_mark(layer) for layer in self._layers]

    def restore(self) -> None:
        del self._layers[len(self._marks) :]  # a cache that was made without a config grows layers as they come
        for layer, mark in zip(self._layers, self._marks, strict=True):
            _restore(layer, *mark)


def _mark(layer) -> tuple[int | None, dict[str, Any], dict[str, dict]]:
    """
    The length of a layer that grows (holding its tensors would double the cache), what it counts, its running states.
    A sliding layer lets go of old tokens in a prefill, so its few tensors themselves are held.
    """
    counted = ["is_initialized", "cumulative_length", "cumulative_length_int"]
    if isinstance(layer, DynamicSlidingWindowLayer):
        counted += ["keys", "values"]
    kept = {name: getattr(layer, name) for name in counted if hasattr(layer, name)}
    if isinstance(layer, StaticLayer):
        kept["cumulative_length"] = kept["cumulative_length"].clone()
    states = {name: dict(getattr(layer, name)) for name in ("conv_states", "recurrent_states") if hasattr(layer, name)}
    return None if getattr(layer, "keys", None) is None else layer.keys.shape[-2], kept, states


def _restore(layer, held: int | None, kept: dict[str, Any], states: dict[str, dict]) -> None:
    if isinstance(layer, StaticLayer):
        # in place: compiled forwards know the tensor by its address
        kept["cumulative_length"] = layer.cumulative_length.copy_(kept["cumulative_length"])
    elif held is not None:
        layer.keys, layer.values = layer.keys[..., :held, :], layer.values[..., :held, :]
    elif hasattr(layer, "keys"):
        layer.keys = layer.values = None
    for name, value in kept.items():
        setattr(layer, name, value)
    for name, saved in states.items():
        getattr(layer, name).update(saved)
