"""Transformers' own assisted generation with an assistant model."""

import copy
from dataclasses import dataclass
from typing import ClassVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from eval.measure import Watched

from .base import Method, MethodResult


@dataclass
class StockAssisted(Method):
    """
    Args:
        schedule (`str`): `num_assistant_tokens_schedule`; the other settings are transformers' defaults.
    """

    schedule: str
    needs_assistant: ClassVar[bool] = True
    largest_batch: ClassVar[int | None] = 1

    def prepare(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, assistant: PreTrainedModel | None
    ) -> None:
        super().prepare(model, tokenizer, assistant)
        # The loop reads the assistant's config and may write into it: this method keeps one of its own between calls.
        self._assistant_config = copy.deepcopy(assistant.generation_config) if assistant is not None else None

    def generate(
        self, inputs: dict[str, torch.Tensor], max_new_tokens: int, do_sample: bool, seed: int
    ) -> MethodResult:
        assert self.assistant is not None and self._assistant_config is not None  # `refusal` has seen to it
        torch.manual_seed(seed)
        others = self.assistant.generation_config
        self._assistant_config.num_assistant_tokens_schedule = self.schedule
        self.assistant.generation_config = self._assistant_config
        try:
            return MethodResult(
                self.model.generate(
                    **inputs, assistant_model=self.assistant, max_new_tokens=max_new_tokens, do_sample=do_sample
                )
            )
        finally:
            self.assistant.generation_config = others

    def drafting_calls(self) -> Watched:
        return [(AssistedCandidateGenerator, "get_candidates")]


METHODS = [
    StockAssisted("stock_assisted_constant", schedule="constant"),
    StockAssisted("stock_assisted_heuristic", schedule="heuristic"),
]
