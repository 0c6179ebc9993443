"""Handing committed tokens to a `BaseStreamer` in the shape in which plain `generate()` does."""

import torch
from transformers.generation import BaseStreamer

from .host import from_host
from .sequences import Sequences


class StreamRelay:
    """
    Puts one token of every row at a time, in order, on the CPU; rows that have ended give padding. In a batch the
    slowest row sets the pace.
    """

    def __init__(self, streamer: BaseStreamer | None, sequences: Sequences):
        self.streamer = streamer
        self.sequences = sequences
        self._put = 0

    def advance(self, finished: list[bool]) -> None:
        """Puts every step that all unfinished rows have reached."""
        if self.streamer is None:
            return
        counts = [self.sequences.num_new(row) for row in range(self.sequences.batch_size)]
        running = [count for count, done in zip(counts, finished, strict=True) if not done]
        reached = min(running) if running else max(counts)
        start, self._put = self._put, max(self._put, reached)
        fresh = [self.sequences.new_tokens(row, start) for row in range(self.sequences.batch_size)]
        for step in range(reached - start):
            tokens = [row[step] if step < len(row) else self.sequences.pad_token_id for row in fresh]
            self.streamer.put(from_host(tokens, dtype=torch.long))

    def end(self) -> None:
        if self.streamer is not None:
            self.streamer.end()
