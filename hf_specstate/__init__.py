"""Speculative decoding for `transformers`: the same text, sooner, with everything that happened on the way."""

from .candidate_generator import SpecStateCandidateGenerator
from .config import SpecStateConfig
from .distributed import gather_spec_states, synchronize_draft_history
from .draft_history import DraftHistory, TenantHistory
from .drafting import (
    DRAFTERS,
    AssistantDrafter,
    Drafter,
    HistoryDrafter,
    PreviousDraftsDrafter,
    PromptLookupDrafter,
    RecyclingDrafter,
    StockDrafter,
)
from .enabling import disable, enable, is_enabled
from .logits_processor import SpecStateLogitsProcessor
from .model_support import ModelSupport, probe
from .outputs import SpecDecoderOnlyOutput, SpecEncoderDecoderOutput
from .pipeline import SpeculativeTextGenerationPipeline
from .recording import SpecStreamer
from .scheduling import SpecProfile
from .states import SpecRound, SpecSequence, SpecStates
from .stream import SpecEvent, SpecStream, stream
from .token_tree import TokenTree

__version__ = "0.1.0"

__all__ = [
    "DRAFTERS",
    "AssistantDrafter",
    "DraftHistory",
    "Drafter",
    "HistoryDrafter",
    "ModelSupport",
    "PreviousDraftsDrafter",
    "PromptLookupDrafter",
    "RecyclingDrafter",
    "SpecDecoderOnlyOutput",
    "SpecEncoderDecoderOutput",
    "SpecEvent",
    "SpecProfile",
    "SpecRound",
    "SpecSequence",
    "SpecStateCandidateGenerator",
    "SpecStateConfig",
    "SpecStateLogitsProcessor",
    "SpecStates",
    "SpecStream",
    "SpecStreamer",
    "SpeculativeTextGenerationPipeline",
    "StockDrafter",
    "TenantHistory",
    "TokenTree",
    "disable",
    "enable",
    "gather_spec_states",
    "is_enabled",
    "probe",
    "stream",
    "synchronize_draft_history",
]
