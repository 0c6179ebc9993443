"""The committed token ids of every row."""

from collections.abc import Iterable

import torch

from .host import from_host, to_host


class Sequences:
    """
    Prompt and committed tokens of every row: lists on the host, where drafters and the walk read them, and a padded
    tensor for logits processors and stopping criteria, filled when one asks for it.

    Args:
        input_ids (`torch.LongTensor` of shape `(batch_size, prompt_length)`): The prompt as `generate()` prepared it.
        prompt_mask (`torch.Tensor` of shape `(batch_size, prompt_length)`, *optional*): 0 marks padding.
        pad_token_id (`int`): Fills the rows that ended early.
    """

    def __init__(self, input_ids: torch.Tensor, prompt_mask: torch.Tensor | None, pad_token_id: int):
        self.batch_size, self.prompt_length = input_ids.shape
        self.pad_token_id = pad_token_id
        prompts = to_host(input_ids)
        if prompt_mask is not None and prompt_mask.shape == input_ids.shape:
            masks = to_host(prompt_mask)
            prompts = [[t for t, seen in zip(*row, strict=True) if seen] for row in zip(prompts, masks, strict=True)]
        self.tokens: list[list[int]] = prompts  # per row: prompt without padding, then every committed token
        self._prompt_lengths = [len(prompt) for prompt in prompts]
        self._padding = [0] * self.batch_size  # that keeps rows in lockstep company after their end
        self._buffer = input_ids  # [batch, capacity]
        self._uploaded = [0] * self.batch_size  # new tokens of each row that the buffer already holds

    @property
    def device(self) -> torch.device:
        return self._buffer.device

    def commit(self, row: int, token: int) -> None:
        self.tokens[row].append(token)

    def pad(self, row: int) -> None:
        """Lets a row that has ended keep pace with the others."""
        self.commit(row, self.pad_token_id)
        self._padding[row] += 1

    def unpadded(self, row: int) -> list[int]:
        """The tokens of `row` up to its end."""
        return self.tokens[row][: len(self.tokens[row]) - self._padding[row]]

    def num_new(self, row: int) -> int:
        """How many tokens `row` has beyond its prompt."""
        return len(self.tokens[row]) - self._prompt_lengths[row]

    def length(self, row: int) -> int:
        """Length of `row` as plain `generate()` counts it: the padded prompt and the new tokens."""
        return self.prompt_length + self.num_new(row)

    def prompt(self, row: int) -> list[int]:
        """The prompt of `row`, without padding."""
        return self.tokens[row][: self._prompt_lengths[row]]

    def new_tokens(self, row: int, start: int = 0) -> list[int]:
        """The committed tokens of `row` from its `start`-th on."""
        return self.tokens[row][self._prompt_lengths[row] + start :]

    def by_length(self, rows: Iterable[int]) -> dict[int, list[int]]:
        """Length -> those of `rows` that have it."""
        found: dict[int, list[int]] = {}
        for row in rows:
            found.setdefault(self.length(row), []).append(row)
        return found

    def ids(self, length: int) -> torch.Tensor:
        """
        `torch.LongTensor` of shape `(batch_size, length)`: the first `length` ids of every row, as plain `generate()`
        would hand them to a logits processor; rows that are shorter are padded.
        """
        self._upload()
        if length > self._buffer.shape[1]:
            self._reserve(length)
        return self._buffer[:, :length].contiguous()

    def finished_ids(self) -> torch.Tensor:
        """`torch.LongTensor` of shape `(batch_size, longest_length)`: what `generate()` returns."""
        return self.ids(max(self.length(row) for row in range(self.batch_size)))

    def _upload(self) -> None:
        longest = max(self.length(row) for row in range(self.batch_size))
        if longest > self._buffer.shape[1]:
            self._reserve(2 * longest)
        for row in range(self.batch_size):
            start, stop = self._uploaded[row], self.num_new(row)
            if start < stop:
                new = from_host(self.new_tokens(row, start), dtype=torch.long)
                self._buffer[row, self.prompt_length + start : self.prompt_length + stop] = new
                self._uploaded[row] = stop

    def _reserve(self, capacity: int) -> None:
        buffer = self._buffer.new_full((self.batch_size, capacity), self.pad_token_id)
        buffer[:, : self._buffer.shape[1]] = self._buffer
        self._buffer = buffer
