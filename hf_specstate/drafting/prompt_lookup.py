"""Drafting by looking up the last tokens in the text so far."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..token_tree import TokenTree
from .base import DraftContext, Drafter, DraftRequest

DEFAULT_NGRAM_SIZE = 4


@dataclass
class PromptLookupDrafter(Drafter):
    """
    Continues the text as it went on the last time that its last tokens occurred (prompt lookup decoding,
    https://github.com/apoorvumang/prompt-lookup-decoding). Takes the longest n-gram that matches anywhere; among its
    places, one that leaves room for the whole draft before the end of the text, the newest of those. (The newest place
    of all is the wrong choice: inside a loop it leaves one token.) In a tree, several places are merged.

    Args:
        max_matching_ngram_size (`int`, *optional*):
            Longest n-gram that is looked up. Defaults to the generation config's, else to 4.
    """

    name: ClassVar[str] = "prompt_lookup"
    default_width: ClassVar[int | None] = 1  # a chain, as in transformers
    max_matching_ngram_size: int | None = None

    def start(self, context: DraftContext) -> None:
        asked = self.max_matching_ngram_size or context.generation_config.max_matching_ngram_size
        self._longest = asked or DEFAULT_NGRAM_SIZE

    def propose(self, request: DraftRequest) -> TokenTree:
        tokens = np.asarray(request.token_ids)
        length = min(request.max_nodes, request.max_depth)
        for ngram_size in range(min(self._longest, len(tokens) - 1), 0, -1):
            starts = _continuations(tokens, ngram_size)
            if len(starts):
                room = np.minimum(len(tokens) - starts, length)
                order = np.lexsort((-starts, -room))[: request.width]
                paths = [tokens[start : start + length].tolist() for start in starts[order]]
                return TokenTree.from_paths(paths, self.name, request.max_nodes)
        return TokenTree()


def _continuations(tokens: np.ndarray, ngram_size: int) -> np.ndarray:
    """Where the text went on after each earlier occurrence of its last `ngram_size` tokens."""
    matches = np.ones(len(tokens) - ngram_size, dtype=bool)
    for offset in range(ngram_size):
        matches &= tokens[offset : offset - ngram_size] == tokens[offset - ngram_size]
    return np.flatnonzero(matches) + ngram_size
