"""How many tokens to draft for a row: transformers' schedules."""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from ..config import SpecStateConfig
from ..drafting.base import DraftOutcome
from .schedule import Schedule

# what the `heuristic` schedule has learned about an enabled model; it goes when the model goes
_remembered: "WeakKeyDictionary[PreTrainedModel, tuple[int, int]]" = WeakKeyDictionary()  # started with, ended with


class ConstantLength(Schedule):
    """`"constant"`: the same number of tokens in every round."""

    def __init__(self, num_tokens: int):
        self._num_tokens = num_tokens

    def max_nodes(self, row: int) -> int:
        return self._num_tokens


class HeuristicLength(Schedule):
    """
    `"heuristic"` and `"heuristic_transient"`: two tokens more after a draft that was accepted as a whole, one fewer (at
    least one) after another. A round without a draft says nothing about drafts and changes nothing.
    """

    def __init__(self, start: int, num_tokens: int, batch_size: int, remembers: bool):
        self._start = start
        self._num_tokens = [num_tokens] * batch_size
        self._remembers = remembers

    def max_nodes(self, row: int) -> int:
        return self._num_tokens[row]

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        for outcome in outcomes:
            if not len(outcome.tree):
                continue
            whole = len(outcome.accepted) == max(outcome.tree.depths)
            current = self._num_tokens[outcome.row]
            self._num_tokens[outcome.row] = current + 2 if whole else max(1, current - 1)

    def close(self, model: PreTrainedModel) -> None:
        """The next `"heuristic"` call of the model goes on from where this one ended, on the average of its rows."""
        if self._remembers:
            _remembered[model] = (self._start, round(sum(self._num_tokens) / len(self._num_tokens)))


def heuristic_length(config: SpecStateConfig, model: PreTrainedModel, batch_size: int) -> HeuristicLength:
    """
    Starts with `max_nodes` for each of `batch_size` rows. `"heuristic"` goes on from what it learned about `model`,
    unless it is told to start with another number than it did then.
    """
    num_tokens = config.max_nodes
    assert num_tokens is not None  # a call's configuration is complete
    start, learned = _remembered.get(model, (num_tokens, num_tokens))
    remembers = config.schedule == "heuristic"
    goes_on = remembers and start == num_tokens
    return HeuristicLength(num_tokens, learned if goes_on else num_tokens, batch_size, remembers)
