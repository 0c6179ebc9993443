"""The logits-processor half of the pair: it watches the target's scores, or conditions an assistant's."""

import torch
from transformers import LogitsProcessor

from .host import from_host

MOST_WEIGHT = 0.999  # of what is expected; more is not told from certainty in half precision


class SpecStateLogitsProcessor(LogitsProcessor):
    """
    One instance stands last in the **target's** processor list and captures the processed scores of the committed
    path. Another stands in an **assistant's** list and conditions its scores on what earlier rounds say about the
    positions now being drafted: the distribution q becomes the mixture (1 - w) q + w on the expected token, with the
    weight w of whoever expects it. The conditioned distribution is the one that acceptance uses. Captures are keyed by
    length, because the stock assisted loop calls processors at every drafted position and hands the same list to its
    assistant.

    Args:
        captures (`bool`, *optional*, defaults to `True`): Capture scores, rather than condition them.
    """

    def __init__(self, captures: bool = True):
        self.captures = captures
        self.rows: list[int] | None = None  # which rows the next scores are of, if not all
        self.captured: dict[int, torch.Tensor] = {}
        self.plain_probs: dict[int, torch.Tensor] = {}  # row -> q of the last token that was expected in it
        self._expected: dict[int, tuple[int, int, float]] = {}

    def expect(self, row: int, length: int, token: int, weight: float) -> None:
        """Says that `token` is expected after `length` tokens of `row`, in place of what was expected in that row."""
        self._expected[row] = (length, token, weight)

    def forget(self) -> None:
        """Expects nothing any more."""
        self._expected.clear()

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
        if self.captures:
            self.captured[input_ids.shape[1]] = scores
            return scores
        due = [
            (row, place, *self._expected[row][1:])
            for place, row in enumerate(range(scores.shape[0]) if self.rows is None else self.rows)
            if row in self._expected and self._expected[row][0] == input_ids.shape[1]
        ]
        due = [entry for entry in due if 0 <= entry[2] < scores.shape[1]]
        if not due:
            return scores
        rows, of_scores, tokens, weights = zip(*due, strict=True)
        places = from_host([of_scores, tokens], scores.device).unbind()
        log_q = scores[places[0]].log_softmax(dim=-1).gather(1, places[1][:, None]).squeeze(1)
        self.plain_probs.update(zip(rows, log_q.exp(), strict=True))
        weight = from_host(weights, scores.device, scores.dtype).clamp(max=MOST_WEIGHT)
        # log(1 + w / ((1 - w) q)) turns q into the mixture if the other scores stay; what was ruled out stays so
        gain = torch.nn.functional.softplus(weight.logit() - log_q)
        return scores.index_put(places, torch.where(log_q.isfinite(), gain, 0), accumulate=True)
