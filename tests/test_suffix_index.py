"""The suffix index against a naive search."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.suffix_structures import SuffixAutomaton
from hf_specstate.drafting.suffix_index import LONGEST_MATCH, MANY, SEPARATOR, SuffixIndex

texts = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=4)


def filled(parts: list[list[int]]) -> SuffixIndex:
    """All texts but the last one are ended."""
    index = SuffixIndex()
    for place, text in enumerate(parts):
        if place:
            index.end_text()
        index.extend(text)
    return index


def naive_matches(tokens: list[int], last: list[int]) -> dict[int, int]:
    """Where a text goes on after some of `last` -> how many of them stand before it."""
    found = {}
    for start in range(1, len(tokens)):
        length = 0
        while (
            length < min(len(last), LONGEST_MATCH, start) and tokens[start - 1 - length] == last[-1 - length]
        ):  # fmt: skip
            length += 1
        if length and tokens[start] != SEPARATOR:
            found[start] = length
    return found


@settings(max_examples=300, deadline=None)
@given(texts, st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_every_place_is_found_with_its_length(parts, other):
    index = filled(parts)
    for last in (parts[-1], other):
        starts, lengths = index.matches(last, limit=1000)
        want = naive_matches(index.tokens.tolist(), last)
        assert dict(zip(starts.tolist(), lengths.tolist(), strict=True)) == want
        assert list(zip(lengths.tolist(), starts.tolist(), strict=True)) == sorted(
            zip(lengths.tolist(), starts.tolist(), strict=True), reverse=True
        )
        few, _ = index.matches(last, limit=2)
        assert few.tolist() == starts.tolist()[:2]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-1, 40), min_size=MANY, max_size=3 * MANY), st.lists(st.integers(0, 40), max_size=9))
def test_many_tokens_are_indexed_as_one_by_one(text, before):
    at_once, one_by_one = filled([before or [0]]), filled([before or [0]])
    at_once.extend(text)
    for token in text:
        one_by_one.extend([token])
    for last in (text[-5:], before, text[:3]):
        for found, want in zip(at_once.matches(last, 1000), one_by_one.matches(last, 1000), strict=True):
            assert found.tolist() == want.tolist()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=60))
def test_the_longest_match_is_that_of_a_suffix_automaton(text):
    index, automaton = SuffixIndex(), SuffixAutomaton()
    for place, token in enumerate(text):
        index.extend([token])
        automaton.extend(token)
        starts, lengths = index.matches(text[: place + 1], limit=1)
        end, length = automaton.match()
        assert min(length, LONGEST_MATCH) == (lengths[0] if len(lengths) else 0)
        assert not length or text[end - length + 1 : end + 1] == text[place - length + 1 : place + 1]


@settings(max_examples=200, deadline=None)
@given(texts, st.integers(1, 8))
def test_continuations_end_with_their_text_or_repeat_it(parts, depth):
    index = filled(parts)
    tokens = index.tokens.tolist()
    starts, _ = index.matches(parts[-1], limit=1000)
    for repeats in (False, True):
        for start, row in zip(starts.tolist(), index.continuations(starts, depth, repeats).tolist(), strict=True):
            follows = tokens[start:] * (depth if repeats else 1)
            want = follows[:depth] + [SEPARATOR] * depth
            ended = want.index(SEPARATOR)
            assert row == (want[:ended] + [SEPARATOR] * depth)[:depth]


@settings(max_examples=200, deadline=None)
@given(texts, st.lists(st.integers(0, 12), max_size=6))
def test_dropping_the_oldest_tokens_is_as_if_they_had_never_been(parts, drops):
    index, kept = filled(parts), None
    kept = index.tokens.tolist()
    for count in drops:
        count = min(count, len(kept))
        index.drop(count)
        kept = kept[count:]
        assert index.tokens.tolist() == kept and len(index) == len(kept)
        found, lengths = index.matches(parts[-1], limit=1000)
        continued = index.continuations(found, 3, repeats=False).tolist()
        fresh = SuffixIndex()
        fresh.extend(kept)
        same, same_lengths = fresh.matches(parts[-1], limit=1000)
        assert lengths.tolist() == same_lengths.tolist()
        assert continued == fresh.continuations(same, 3, repeats=False).tolist()


def test_it_grows_and_can_be_extended_after_dropping():
    index = SuffixIndex()
    for token in range(3000):
        index.extend([token % 7])
    index.drop(2500)
    index.extend([100, 0, 1])
    starts, lengths = index.matches([0, 1], limit=3)
    assert len(starts) == 3 and index.continuations(starts, 1, repeats=False).tolist() == [[2]] * 3
    assert np.array_equal(lengths, [2, 2, 2])
    assert len(index.matches([99], limit=3)[0]) == len(index.matches([], limit=3)[0]) == 0
