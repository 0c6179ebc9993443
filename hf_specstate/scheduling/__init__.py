"""How much to draft."""

from .length import ConstantLength, HeuristicLength, make_schedule

__all__ = ["ConstantLength", "HeuristicLength", "make_schedule"]
