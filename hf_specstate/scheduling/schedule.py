"""What decides how much is drafted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from ..drafting.base import Drafter, DraftOutcome
from ..token_tree import TokenTree


@dataclass
class Ask:
    """
    How much a drafter may propose in this round.

    Args:
        max_nodes (`int`): Most nodes of a row; 0 if it is not asked.
        least_gain (`float`): Tokens, over all rows, that one more step of its model must be expected to give.
        together (`bool`): What counts for that is what all rows have in common.
    """

    max_nodes: int
    least_gain: float = 0.0
    together: bool = False


@dataclass
class Choice:
    """
    Why a round is as large as it is.

    Args:
        num_nodes (`int`): Of the largest row.
        why (`str`): `"best"`, `"off"`, `"explore"` (to measure what such a forward costs), `"fixed"` (before drafting).
        expected_tokens (`dict[int, float]`): Of every row.
        expected_seconds (`float`): Of the target's forward; 0 before anything was measured.
        considered_nodes (`int`), considered_tokens (`float`), considered_cost (`float`):
            Of the best draft that there was, whether it was taken or not: its size, the tokens that it was expected to
            give a row, and the time of its round as a multiple of one without a draft.
    """

    num_nodes: int
    why: str
    expected_tokens: dict[int, float]
    expected_seconds: float
    considered_nodes: int
    considered_tokens: float
    considered_cost: float


@dataclass
class RoundTimes:
    """
    Args:
        width (`int`): Slots of each row in the target's forward.
        forward_seconds (`float`): That it took.
        other_seconds (`float`): The rest of the round.
    """

    width: int
    forward_seconds: float
    other_seconds: float


class Schedule:
    """Base class. Only `max_nodes` must be implemented."""

    wants_times = False  # whether rounds must be timed
    choice: Choice | None = None  # of the last round, where there was one

    def max_nodes(self, row: int) -> int:
        """Most nodes that `row` may have in this round."""
        raise NotImplementedError

    def ask(self, drafter: Drafter, rows: Sequence[int], known: Mapping[int, TokenTree]) -> Ask:
        """
        Before a drafter is asked.

        Args:
            drafter ([`Drafter`]): The drafter.
            rows (`list[int]`): The rows that go on.
            known (`dict[int, TokenTree]`): What drafters before it have proposed for some of them.
        """
        return Ask(max(map(self.max_nodes, rows), default=0))

    def asked(self, drafter: Drafter, seconds: float) -> None:
        """After a drafter was asked, which took `seconds`."""

    def taught(self, drafter: Drafter, seconds: float) -> None:
        """After a drafter was told how a round went, which took `seconds`."""

    def dropped(self, drafter: Drafter) -> None:
        """A drafter has failed and is not asked again."""

    def choose(self, rows: Sequence[int], trees: Mapping[int, TokenTree]) -> dict[int, TokenTree]:
        """What of the proposed trees is verified; their `confidences` are the chances to be accepted."""
        return dict(trees)

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        """What became of the drafts."""

    def observe_times(self, times: RoundTimes) -> None:
        """What the round took, if `wants_times`."""

    def close(self, model: PreTrainedModel) -> None:
        """The generation has ended."""
