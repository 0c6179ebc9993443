"""How much to draft."""

from transformers import PreTrainedModel

from ..config import SpecStateConfig
from .acceptance import Acceptance
from .cost import RoundCost, recall_cost
from .goodput import GoodputSchedule
from .length import ConstantLength, HeuristicLength, heuristic_length
from .schedule import Ask, Choice, RoundTimes, Schedule

__all__ = [
    "Acceptance",
    "Ask",
    "Choice",
    "ConstantLength",
    "GoodputSchedule",
    "HeuristicLength",
    "RoundCost",
    "RoundTimes",
    "Schedule",
    "make_schedule",
]


def make_schedule(
    config: SpecStateConfig,
    model: PreTrainedModel,
    batch_size: int,
    acceptance: Acceptance | None = None,
    together: bool = False,
    fixed_slots: bool = False,
) -> Schedule:
    """
    The schedule that `config` names.

    Args:
        config ([`SpecStateConfig`]): A call's, complete.
        model (`PreTrainedModel`): The target.
        batch_size (`int`): Rows.
        acceptance ([`Acceptance`], *optional*): Of the generation's drafts.
        together (`bool`, *optional*, defaults to `False`): Rows advance by the same number of tokens.
        fixed_slots (`bool`, *optional*, defaults to `False`): The target's cache is static.
    """
    assert config.max_nodes is not None
    if config.schedule == "constant":
        return ConstantLength(config.max_nodes)
    if config.schedule != "goodput":
        return heuristic_length(config, model, batch_size)
    return GoodputSchedule(
        config.max_nodes,
        batch_size,
        together=together,
        fixed_slots=fixed_slots,
        cuts=config.acceptance == "match",
        acceptance=acceptance or Acceptance(batch_size),
        cost=recall_cost(model, batch_size),
    )
