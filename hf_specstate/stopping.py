"""Deciding, after each committed token, which rows have ended, and why."""

from collections.abc import Sequence
from itertools import chain

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

# why a row ends, most telling first, if several criteria end it at once
REASONS = ("eos", "stop_string", "criterion", "length")
# criteria that look at one row's tokens alone, by exact type: rows of different lengths may be checked separately
STATELESS_CRITERIA = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria)
COUNTABLE_CRITERIA = (EosTokenCriteria, MaxLengthCriteria)


class StopCheck:
    """
    Args:
        criteria (`StoppingCriteriaList`): As `generate()` prepared them.
        sequences ([`Sequences`]): The tokens so far.
    """

    def __init__(self, criteria: StoppingCriteriaList, sequences: Sequences):
        self.criteria = criteria
        self.sequences = sequences
        self.pads_finished_rows = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        self._counted = all(
            type(criterion) in COUNTABLE_CRITERIA and not _may_warn(criterion) for criterion in criteria
        )
        self._stateless = all(type(criterion) in STATELESS_CRITERIA for criterion in criteria)
        self._max_length = min((c.max_length for c in criteria if type(c) is MaxLengthCriteria), default=None)
        eos = [c.eos_token_id for c in criteria if type(c) is EosTokenCriteria]
        self._eos = {token for ids in eos for token in to_host(ids.reshape(-1))} if self._counted else set()

    def __call__(self, rows: Sequence[int], scores: Sequence | None) -> list[str | None]:
        """
        Why each of `rows` has ended with its last token, one of `REASONS`; None if it goes on.

        Args:
            rows (`list[int]`): The rows that have just been given a token.
            scores (`tuple`, *optional*): Passed on to the criteria, as plain decoding does.
        """
        if self._counted:  # end-of-sequence and length alone are decided without waiting for the device
            return [self._counted_reason(row) for row in rows]
        by_length = self.sequences.by_length(rows)  # one, in lockstep
        answers = []
        for length, own in by_length.items():
            ids = self.sequences.ids(length)
            answers.append(self._ask(ids[own], scores) if self._stateless else self._ask(ids, scores)[:, own])
        reasons = map(self._reason, to_host(torch.cat(answers, dim=1).t()))
        by_row = dict(zip(chain.from_iterable(by_length.values()), reasons, strict=True))
        return [by_row[row] for row in rows]

    def _ask(self, ids: torch.Tensor, scores: Sequence | None) -> torch.Tensor:
        """`torch.BoolTensor` of shape `(criteria, rows)`: each criterion is called once, as by its list."""
        ended = torch.zeros((len(self.criteria), ids.shape[0]), dtype=torch.bool, device=ids.device)
        for place, criterion in enumerate(self.criteria):
            ended[place] = ended[place] | criterion(ids, scores)
        return ended

    def _reason(self, ended: Sequence[bool]) -> str | None:
        named = [_name(criterion) for criterion, has in zip(self.criteria, ended, strict=True) if has]
        return min(named, key=REASONS.index, default=None)

    def _counted_reason(self, row: int) -> str | None:
        if self.sequences.tokens[row][-1] in self._eos:
            return "eos"
        at_limit = self._max_length is not None and self.sequences.length(row) >= self._max_length
        return "length" if at_limit else None


def _name(criterion) -> str:
    if isinstance(criterion, EosTokenCriteria):
        return "eos"
    if isinstance(criterion, StopStringCriteria):
        return "stop_string"
    return "length" if isinstance(criterion, MaxLengthCriteria) else "criterion"


def _may_warn(criterion) -> bool:
    """The length criterion warns once when a text outgrows the model's context: let it be asked then."""
    limit = getattr(criterion, "max_position_embeddings", None)
    return limit is not None and criterion.max_length > limit
