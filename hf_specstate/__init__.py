"""Speculative decoding for `transformers`: the same text, sooner, with everything that happened on the way."""

from .candidate_generator import SpecStateCandidateGenerator
from .config import SpecStateConfig
from .drafting import DRAFTERS, Drafter
from .enabling import disable, enable, is_enabled
from .logits_processor import SpecStateLogitsProcessor
from .model_support import ModelSupport, probe
from .outputs import SpecDecoderOnlyOutput, SpecEncoderDecoderOutput
from .states import SpecRound, SpecSequence, SpecStates
from .token_tree import TokenTree

__version__ = "0.1.0"

__all__ = [
    "DRAFTERS",
    "Drafter",
    "ModelSupport",
    "SpecDecoderOnlyOutput",
    "SpecEncoderDecoderOutput",
    "SpecRound",
    "SpecSequence",
    "SpecStateCandidateGenerator",
    "SpecStateConfig",
    "SpecStateLogitsProcessor",
    "SpecStates",
    "TokenTree",
    "disable",
    "enable",
    "is_enabled",
    "probe",
]
