"""Rows that accept different tokens, over caches whose every slot says whose it is, against lists of tokens."""

from itertools import count

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Cache, DynamicCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from hf_specstate.row_cache import CacheMarks, RowCache, can_gather

WINDOW = 5
STATIC_LENGTH = 40
PROMPT = 4
# name -> (layers, layout)
CACHES = {
    "holes": (lambda: [DynamicLayer(), DynamicLayer()], False),
    "aligned": (lambda: [DynamicLayer(), DynamicLayer()], True),
    "sliding": (lambda: [DynamicSlidingWindowLayer(WINDOW), DynamicLayer()], True),
    "static": (lambda: [StaticLayer(STATIC_LENGTH), StaticLayer(STATIC_LENGTH)], True),
    "static_sliding": (
        lambda: [StaticSlidingWindowLayer(STATIC_LENGTH, STATIC_LENGTH), StaticLayer(STATIC_LENGTH)],
        True,
    ),
}


def states(row: int, tokens: list[int], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of shape `(1 head, slots, 2)`: keys say (row, token), values also the layer."""
    keys = torch.tensor([[row + 1.0, token] for token in tokens])[None].reshape(1, len(tokens), 2)
    return keys, -keys - 1000 * layer


class World:
    """A row cache, what was written into it, and the tokens that each row should still have."""

    def __init__(self, kind: str, batch_size: int, padding: list[int]):
        layers, aligned = CACHES[kind]
        self.cache = Cache(layers=layers())
        self.fresh_tokens = count(1)
        self.tokens = self.write(batch_size, PROMPT)
        visible = torch.tensor([[slot >= hidden for slot in range(PROMPT)] for hidden in padding])
        self.padding = padding
        self.rows = RowCache(self.cache, visible, aligned)
        self.written: list[list[int]] = [[] for _ in padding]  # pending tokens

    def write(self, batch_size: int, width: int, layers: int = 2) -> list[list[int]]:
        """A forward that puts new tokens into the first `layers` layers."""
        tokens = [[next(self.fresh_tokens) for _ in range(width)] for _ in range(batch_size)]
        for layer in range(layers):
            by_row = [states(row, ids, layer) for row, ids in enumerate(tokens)]
            self.cache.update(*map(torch.stack, zip(*by_row, strict=True)), layer)
        return tokens

    def forward(self, width: int) -> None:
        self.rows.begin()
        for known, new in zip(self.written, self.write(len(self.written), width), strict=True):
            known += new
        lengths = torch.tensor(self.rows.lengths)[:, None] + self.rows.pending
        self.rows.end(lengths + torch.arange(width))

    def interrupted_forward(self, width: int, layers: int) -> None:
        self.rows.begin()
        self.write(len(self.written), width, layers)
        self.rows.rollback()

    def keep(self, paths: list[list[int]]) -> None:
        self.rows.keep(paths)
        for known, written, path in zip(self.tokens, self.written, paths, strict=True):
            known += [written[slot] for slot in path]
        self.written = [[] for _ in paths]

    def held(self, layer) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Keys, values and the number of slots that the layer has already dropped from its front."""
        if isinstance(layer, StaticLayer):
            return layer.keys[:, :, : self.rows.slots], layer.values[:, :, : self.rows.slots], 0
        return layer.keys, layer.values, self.rows.slots - layer.keys.shape[-2]

    def check(self) -> None:
        """Every row's visible slots, in the order of `index`, are its tokens in every layer."""
        rows = self.rows
        assert rows.pending == 0
        assert rows.lengths == list(map(len, self.tokens))
        assert rows.index.shape == rows.visible.shape == (len(self.tokens), rows.slots)
        for number, layer in enumerate(self.cache.layers):
            assert int(layer.get_seq_length()) == rows.slots
            if isinstance(layer, StaticSlidingWindowLayer):
                assert layer.cumulative_length_int == rows.slots
            keys, values, dropped = self.held(layer)
            assert dropped == (max(rows.slots - WINDOW + 1, 0) if isinstance(layer, DynamicSlidingWindowLayer) else 0)
            for row, tokens in enumerate(self.tokens):
                order = [int(slot) for slot in rows.index[row].argsort() if rows.index[row, slot] >= 0]
                assert rows.index[row, order].tolist() == list(range(len(tokens)))
                assert rows.visible[row, order].tolist() == [place >= self.padding[row] for place in range(len(tokens))]
                assert int(rows.visible[row].sum()) == len(tokens) - self.padding[row]
                here = [slot - dropped for slot in order if slot >= dropped]
                if dropped:  # a window of slots must hold a window of tokens
                    assert len(here) == min(WINDOW - 1, len(tokens))
                want_keys, want_values = states(row, tokens[len(tokens) - len(here) :], number)
                assert torch.equal(keys[row, :, here], want_keys)
                assert torch.equal(values[row, :, here], want_values)

    def check_finalized(self, length: int) -> None:
        """Slot `i` of a row holds its token `i`; zeros follow."""
        assert self.rows.slots == length
        for number, layer in enumerate(self.cache.layers):
            assert int(layer.get_seq_length()) == length
            keys, values, dropped = self.held(layer)
            for row, tokens in enumerate(self.tokens):
                want_keys, want_values = states(row, tokens[:length], number)
                empty = torch.zeros(1, max(length - len(tokens), 0), 2)
                assert torch.equal(keys[row], torch.cat([want_keys, empty], dim=1)[:, dropped:])
                assert torch.equal(values[row], torch.cat([want_values, empty], dim=1)[:, dropped:])


@st.composite
def rounds(draw, batch_size: int):
    """Rounds: the widths of the forwards, an interrupted forward before some, and the slots that rows keep."""
    script = []
    for _ in range(draw(st.integers(1, 6))):
        interrupted = draw(st.none() | st.tuples(st.integers(1, 3), st.integers(0, 2)))
        widths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=2))
        slots = st.lists(st.integers(0, sum(widths) - 1), unique=True, max_size=4).map(sorted)
        script.append((widths, interrupted, [draw(slots) for _ in range(batch_size)]))
    return script


@pytest.mark.parametrize("kind", CACHES)
@settings(max_examples=80, deadline=None, derandomize=True)
@given(data=st.data())
def test_rows_keep_exactly_their_tokens(kind, data):
    batch_size = data.draw(st.integers(1, 3))
    world = World(kind, batch_size, data.draw(st.lists(st.integers(0, 3), min_size=batch_size, max_size=batch_size)))
    world.check()
    for widths, interrupted, paths in data.draw(rounds(batch_size)):
        for place, width in enumerate(widths):
            if interrupted is not None and place == len(widths) - 1:  # with or without pending slots before it
                world.interrupted_forward(*interrupted)
            world.forward(width)
        if world.rows.room is not None:
            assert world.rows.room == STATIC_LENGTH - world.rows.slots - sum(widths)
        world.keep(paths)
        world.check()
    longest = max(world.rows.lengths)
    length = data.draw(st.none() | st.integers(1, longest))
    world.rows.finalize(length)
    world.check_finalized(longest if length is None or kind.endswith("sliding") else length)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(data=st.data())
def test_holes_are_copied_away_only_above_a_quarter_of_waste(data):
    batch_size = data.draw(st.integers(1, 3))
    world = World("holes", batch_size, [0] * batch_size)
    for widths, _, paths in data.draw(rounds(batch_size)):
        for width in widths:
            world.forward(width)
        before = [layer.keys.untyped_storage().data_ptr() for layer in world.cache.layers]
        slots = world.rows.slots + max(map(len, paths))
        world.keep(paths)
        is_same = [layer.keys.untyped_storage().data_ptr() for layer in world.cache.layers] == before
        waste = slots - max(world.rows.lengths)
        assert is_same == (waste <= 0.25 * slots)
        assert world.rows.slots == (slots if is_same else max(world.rows.lengths))


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_an_interrupted_prefill_leaves_nothing(layers):
    """Such a cache makes its layers as states come."""
    cache = DynamicCache()
    marks = CacheMarks(cache)
    for layer in range(layers):
        cache.update(*(part[None] for part in states(0, [1, 2], layer)), layer)
    marks.restore()
    assert len(cache) == 0 and cache.get_seq_length() == 0


def test_finalize_gives_back_the_layers_own_recording():
    world = World("sliding", 1, [0])
    assert world.cache.layers[0].record_past
    world.forward(3)
    world.keep([[0]])
    world.rows.finalize()
    assert not world.cache.layers[0].record_past


def test_a_layer_of_another_kind_cannot_be_gathered():
    class OtherLayer(DynamicLayer):
        """Might hold anything."""

    world = World("holes", 1, [0])
    assert can_gather(world.cache)
    world.cache.layers[1] = OtherLayer()
    assert can_gather(world.cache), "a layer that holds nothing is no obstacle"
    world.write(1, 1)
    assert not can_gather(world.cache)
