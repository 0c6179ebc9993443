"""Deciding, after each committed token, which rows have ended, and why."""

from collections.abc import Sequence

import torch
from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)

from .host import to_host
from .sequences import Sequences

# criteria that look at one row's tokens alone, by exact type: rows of different lengths may be checked separately
STATELESS_CRITERIA = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria)
COUNTABLE_CRITERIA = (EosTokenCriteria, MaxLengthCriteria)


class StopCheck:
    """
    Args:
        criteria (`StoppingCriteriaList`): As `generate()` prepared them.
        sequences ([`Sequences`]): The tokens so far.
        together (`bool`): All rows stand at the same length.
    """

    def __init__(self, criteria: StoppingCriteriaList, sequences: Sequences, together: bool):
        self.criteria = criteria
        self.sequences = sequences
        self.together = together
        self.pads_finished_rows = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        self._counted = all(
            type(criterion) in COUNTABLE_CRITERIA and not _may_warn(criterion) for criterion in criteria
        )
        self._max_length = min((c.max_length for c in criteria if type(c) is MaxLengthCriteria), default=None)
        eos = [c.eos_token_id for c in criteria if type(c) is EosTokenCriteria]
        self._eos = {token for ids in eos for token in to_host(ids.reshape(-1))} if self._counted else set()

    def __call__(self, rows: Sequence[int], scores: Sequence | None) -> list[bool]:
        """
        Whether each of `rows` has ended with its last token.

        Args:
            rows (`list[int]`): The rows that have just been given a token.
            scores (`tuple`, *optional*): Passed on to the criteria, as plain decoding does.
        """
        if self._counted:  # end-of-sequence and length alone are decided without waiting for the device
            return [self._has_ended(row) for row in rows]
        if self.together:
            ended = to_host(self.criteria(self.sequences.ids(self.sequences.length(rows[0])), scores))
            return [ended[row] for row in rows]
        lengths = [self.sequences.length(row) for row in rows]
        by_length = {length: self.criteria(self.sequences.ids(length), scores) for length in set(lengths)}
        stacked = torch.stack([by_length[length][row] for row, length in zip(rows, lengths, strict=True)])
        return to_host(stacked)

    def _has_ended(self, row: int) -> bool:
        at_limit = self._max_length is not None and self.sequences.length(row) >= self._max_length
        return at_limit or self.sequences.tokens[row][-1] in self._eos


def _may_warn(criterion) -> bool:
    """The length criterion warns once when a text outgrows the model's context: let it be asked then."""
    limit = getattr(criterion, "max_position_embeddings", None)
    return limit is not None and criterion.max_length > limit
