"""How much to draft."""

from ..drafting.base import DraftContext
from .acceptance import Acceptance
from .agreement import agreement
from .cost import Place, RoundCost, place_of, recall_cost, remember_cost
from .goodput import GoodputSchedule
from .length import ConstantLength, HeuristicLength, heuristic_length
from .profile import SpecProfile
from .schedule import Ask, Choice, RoundTimes, Schedule

__all__ = [
    "Acceptance",
    "Ask",
    "Choice",
    "ConstantLength",
    "GoodputSchedule",
    "HeuristicLength",
    "Place",
    "RoundCost",
    "RoundTimes",
    "Schedule",
    "SpecProfile",
    "make_schedule",
    "place_of",
    "recall_cost",
    "remember_cost",
]


def make_schedule(
    context: DraftContext, together: bool, fixed_slots: bool = False, cost: RoundCost | None = None
) -> Schedule:
    """
    The schedule that the configuration names.

    Args:
        context ([`DraftContext`]): The generation.
        together (`bool`): Rows advance by the same number of tokens.
        fixed_slots (`bool`, *optional*, defaults to `False`): The target's cache is static.
        cost ([`RoundCost`], *optional*): What `"goodput"` knows of it; nothing if absent.
    """
    config, batch_size = context.config, context.sequences.batch_size
    assert config.max_nodes is not None  # a call's configuration is complete
    if config.schedule == "constant":
        return ConstantLength(config.max_nodes)
    if config.schedule != "goodput":
        return heuristic_length(config, context.model, batch_size)
    return GoodputSchedule(
        config.max_nodes,
        together=together and batch_size > 1,
        fixed_slots=fixed_slots,
        cuts=config.acceptance == "match",
        acceptance=context.acceptance,
        cost=cost or RoundCost(),
        agree=agreement(context.model),
    )
