"""Transformers' own prompt lookup decoding."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from eval.measure import Watched

from .base import Method, MethodResult


@dataclass
class StockPromptLookup(Method):
    """
    Args:
        num_tokens (`int`): `prompt_lookup_num_tokens`, with the value that transformers' documentation uses.
    """

    name: str = "stock_prompt_lookup"
    num_tokens: int = 10
    largest_batch: ClassVar[int | None] = 1

    def generate(
        self, inputs: dict[str, torch.Tensor], max_new_tokens: int, do_sample: bool, seed: int
    ) -> MethodResult:
        torch.manual_seed(seed)
        return MethodResult(
            self.model.generate(
                **inputs,
                prompt_lookup_num_tokens=self.num_tokens,
                max_new_tokens=max_new_tokens,
                do_sample=do_sample,
            )
        )

    def drafting_calls(self) -> Watched:
        return [(PromptLookupCandidateGenerator, "get_candidates")]


METHODS = [StockPromptLookup()]
