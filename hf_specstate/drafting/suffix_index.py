"""Finding where the last tokens of a text occurred before, and how it went on."""

from array import array
from collections import defaultdict
from collections.abc import Iterable

import numpy as np

SEPARATOR = -1  # between texts; matches nothing
MANY = 256  # new tokens, from which sorting them beats noting one after the other
LONGEST_MATCH = 32  # tokens that are compared
MOST_PLACES = 4096  # newest occurrences of a token that are looked at


class SuffixIndex:
    """
    The tokens of one or more texts, with the places of every token. Appending a token takes constant time and 8 bytes
    (a token and a place), plus about 150 bytes for each different token; a lookup compares the places of one token
    only, backwards from there, for all of them at once. (A suffix automaton finds the longest match without comparing,
    but takes some hundred bytes and several dictionary updates a token in Python.)
    """

    def __init__(self):
        self._tokens = np.empty(256, dtype=np.int32)
        self._size = 0
        self._begin = 0  # what lies before has been dropped
        self._places: defaultdict[int, array] = defaultdict(lambda: array("i"))

    def __len__(self) -> int:
        return self._size - self._begin

    @property
    def tokens(self) -> np.ndarray:
        """`(size,)`: all tokens, with a separator behind each ended text."""
        return self._tokens[self._begin : self._size]

    def drop(self, count: int) -> None:
        """Forgets the `count` oldest tokens; their room is given back when half of the index is such."""
        self._begin += count
        if self._begin > len(self):
            kept = self.tokens.tolist()
            self.__init__()  # type: ignore[misc]
            self.extend(kept)

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends to the text at the end."""
        new = np.fromiter(tokens, dtype=np.int32)
        if self._size + len(new) > len(self._tokens):
            grown = np.empty(2 * (self._size + len(new)), dtype=np.int32)
            grown[: self._size] = self._tokens[: self._size]
            self._tokens = grown
        self._tokens[self._size : self._size + len(new)] = new
        if len(new) < MANY:
            for place, token in enumerate(new.tolist(), start=self._size):
                self._places[token].append(place)
        else:  # token by token, rather than place by place
            order = np.argsort(new, kind="stable")
            known, begins = np.unique(new[order], return_index=True)
            places = np.split((order + self._size).astype(np.int32), begins[1:])
            for token, group in zip(known.tolist(), places, strict=True):
                self._places[token].frombytes(group.tobytes())
        self._size += len(new)

    def end_text(self) -> None:
        """What comes next is another text."""
        self.extend([SEPARATOR])

    def matches(self, last_tokens: list[int], limit: int) -> tuple[np.ndarray, np.ndarray]:
        """
        Args:
            last_tokens (`list[int]`): The end of a text, of this index or another.
            limit (`int`): Most places.

        Returns:
            `(starts, lengths)`, each of shape `(places,)`: where the text went on after an occurrence of the last
            tokens, and how many of them occurred there; longest first, then newest first.
        """
        known = self._places.get(last_tokens[-1]) if last_tokens else None
        if known is None:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        ends = np.frombuffer(known[-MOST_PLACES:], dtype=np.int32).astype(np.int64)
        ends = ends[(ends >= self._begin) & (ends + 1 < self._size)]
        ends = ends[self._tokens[ends + 1] != SEPARATOR][::-1]
        lengths = np.ones(len(ends), dtype=np.int64)
        going = np.arange(len(ends))
        for back in range(1, min(LONGEST_MATCH, len(last_tokens))):
            places = ends[going] - back
            going = going[(places >= self._begin) & (self._tokens[places] == last_tokens[-1 - back])]
            if not len(going):
                break
            lengths[going] += 1
        order = np.argsort(-lengths, kind="stable")[:limit]
        return ends[order] + 1, lengths[order]

    def continuations(self, starts: np.ndarray, depth: int, repeats: bool) -> np.ndarray:
        """
        `(places, depth)`: the tokens from each of `starts` on, padded with separators behind the end of a text. If it
        `repeats`, the last text is taken to go on as it did from there, again and again, where it is at its end.
        """
        offsets = np.arange(depth)[None]
        if repeats:
            offsets = offsets % (self._size - starts)[:, None]
        places = starts[:, None] + offsets
        found = self._tokens[np.minimum(places, self._size - 1)]
        ended = (found == SEPARATOR) | (places >= self._size)
        return np.where(np.logical_or.accumulate(ended, axis=1), SEPARATOR, found)
