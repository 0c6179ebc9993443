"""Drafters, by name. A new one is one file and one line here."""

from .assistant import AssistantDrafter
from .base import DraftContext, Drafter, DraftOutcome, DraftRequest, ModelRuns
from .history import HistoryDrafter
from .previous_drafts import PreviousDraftsDrafter
from .prompt_lookup import PromptLookupDrafter
from .recycling import RecyclingDrafter
from .stock import StockDrafter

DRAFTERS: dict[str, type[Drafter]] = {
    drafter.name: drafter
    for drafter in (
        AssistantDrafter,
        HistoryDrafter,
        PreviousDraftsDrafter,
        PromptLookupDrafter,
        RecyclingDrafter,
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
    "HistoryDrafter",
    "ModelRuns",
    "PreviousDraftsDrafter",
    "PromptLookupDrafter",
    "RecyclingDrafter",
    "StockDrafter",
]
