"""Drafters, by name. A new one is one file and one line here."""

from .assistant import AssistantDrafter
from .base import DraftContext, Drafter, DraftOutcome, DraftRequest
from .prompt_lookup import PromptLookupDrafter
from .stock import StockDrafter

DRAFTERS: dict[str, type[Drafter]] = {
    drafter.name: drafter
    for drafter in (
        AssistantDrafter,
        PromptLookupDrafter,
        StockDrafter,
    )
}

__all__ = [
    "DRAFTERS",
    "AssistantDrafter",
    "DraftContext",
    "DraftOutcome",
    "DraftRequest",
    "Drafter",
    "PromptLookupDrafter",
    "StockDrafter",
]
