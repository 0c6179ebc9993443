"""The logits-processor half of the pair: it watches the target's scores, or conditions an assistant's."""

import torch
from transformers import LogitsProcessor

CONDITIONING_STRENGTH = 1.0  # added to a logit; e times the odds of a token that the target itself named before


class SpecStateLogitsProcessor(LogitsProcessor):
    """
    One instance stands last in the **target's** processor list and captures the processed scores of the committed
    path. Another stands in an **assistant's** list and conditions its scores on what the target answered, after the
    last mismatch, at the positions now being drafted (the *answer tail*); the conditioned distribution is the one that
    acceptance uses. Captures are keyed by length, because the stock assisted loop calls processors at every drafted
    position and hands the same list to its assistant.

    Args:
        strength (`float`, *optional*, defaults to 0.0):
            Added to the logits of expected tokens. 0 only captures.
    """

    def __init__(self, strength: float = 0.0):
        self.strength = strength
        self.captured: dict[int, torch.Tensor] = {}
        self._expected: dict[int, dict[int, int]] = {}

    def expect(self, row: int, start: int, tokens: list[int]) -> None:
        """Says that `tokens` are expected in `row` at the sequence positions `start`, `start + 1`, … and no others."""
        self._expected[row] = {start + offset: token for offset, token in enumerate(tokens)}

    def scores_at(self, length: int, row: int) -> torch.Tensor:
        """`torch.FloatTensor` of shape `(vocab_size,)`: the last processed scores after `length` tokens of `row`."""
        return self.captured[length][row]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """
        Args:
            input_ids (`torch.LongTensor` of shape `(batch_size, sequence_length)`): The tokens so far.
            scores (`torch.FloatTensor` of shape `(batch_size, vocab_size)`): Scores of the next token.

        Returns:
            `torch.FloatTensor` of shape `(batch_size, vocab_size)`.
        """
        length = input_ids.shape[1]
        if self.strength:
            scores = scores.clone()
            for row, expected in self._expected.items():
                if row < scores.shape[0] and expected.get(length, scores.shape[1]) < scores.shape[1]:
                    scores[row, expected[length]] += self.strength
        else:
            self.captured[length] = scores
        return scores
