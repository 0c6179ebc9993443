"""Transformers' own candidate generators as drafters."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.candidate_generator import (
    AssistedCandidateGeneratorDifferentTokenizers,
    CandidateGenerator,
    PromptLookupCandidateGenerator,
)

from ..token_tree import TokenTree
from .base import DraftContext, Drafter, DraftRequest, ModelRuns


@dataclass
class StockDrafter(Drafter):
    """
    Drafts with a `CandidateGenerator` of transformers, one instance a row, taking its tokens as point masses (so that
    sampling stays exact). Only generators that do not ask for the target's outputs will do.

    Args:
        make_generator (`Callable[[DraftContext, int], CandidateGenerator]`, *optional*):
            Makes the generator of a row. Defaults to `AssistedCandidateGeneratorDifferentTokenizers` when
            `generate()` was given an assistant model and two tokenizers, else to `PromptLookupCandidateGenerator`.
    """

    name: ClassVar[str] = "stock"
    make_generator: Callable[[DraftContext, int], CandidateGenerator] | None = None

    def start(self, context: DraftContext) -> None:
        self._context = context
        self._generators: dict[int, CandidateGenerator] = {}
        self._ends: dict[int, int] = {}  # row -> where its last draft ended
        self.runs = None if context.assistant_model is None else ModelRuns()

    def propose_rows(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        is_first = any(request.row not in self._generators for request in requests)
        began = time.perf_counter()
        trees = [self.propose(request) for request in requests]
        if self.runs is not None and not is_first:  # the first time goes into prefills
            longest = max(map(len, trees), default=0)
            seconds = time.perf_counter() - began
            step = seconds / max(longest, 1)
            # it has to catch up with what came since it was last asked
            is_late = any(len(request.token_ids) > self._ends[request.row] + 1 + longest for request in requests)
            self.runs = ModelRuns(step, seconds - step, max(longest - 1, 0), longest, is_late)
        self._ends |= {
            request.row: len(request.token_ids) + len(tree) for request, tree in zip(requests, trees, strict=True)
        }
        return trees

    def propose(self, request: DraftRequest) -> TokenTree:
        device = self._context.input_ids.device
        input_ids = torch.tensor([request.token_ids], device=device)
        generator = self._generators.get(request.row)
        if generator is None:
            generator = (self.make_generator or _default_generator)(self._context, request.row)
            if generator.requires_model_outputs:
                raise ValueError(
                    f"{type(generator).__name__} needs the target's outputs and cannot be a stock drafter."
                )
            self._generators[request.row] = generator
        length = min(request.max_nodes, request.max_depth)
        generator.num_assistant_tokens = generator.num_output_tokens = length
        candidates, _ = generator.get_candidates(input_ids)
        drafted = candidates[0, input_ids.shape[1] :][:length].tolist()
        usable = next((place for place, token in enumerate(drafted) if token >= self._context.vocab_size), len(drafted))
        return TokenTree.from_paths([drafted[:usable]], self.name)


def _default_generator(context: DraftContext, row: int) -> CandidateGenerator:
    asked = context.generation_config
    assistant = context.assistant_model
    if assistant is None or context.assistant_tokenizer is None:
        return PromptLookupCandidateGenerator(
            num_output_tokens=asked.prompt_lookup_num_tokens or 1,
            max_matching_ngram_size=asked.max_matching_ngram_size or 2,
            max_length=asked.max_length,
        )
    # Nothing of the target's config holds in another vocabulary. Drafts are greedy: they are point masses anyway, and
    # drawing them would use up the caller's random numbers. The loop bounds their length itself.
    config = GenerationConfig(do_sample=False, min_length=0, max_length=asked.max_length)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, getattr(assistant.generation_config, name))
    tokens = torch.tensor([context.sequences.tokens[row]], device=context.input_ids.device)
    generator = AssistedCandidateGeneratorDifferentTokenizers(
        input_ids=tokens,
        assistant_model=assistant,
        target_tokenizer=context.tokenizer,
        assistant_tokenizer=context.assistant_tokenizer,
        generation_config=config,
        model_kwargs={"use_cache": True},
        inputs_tensor=tokens,
        logits_processor=LogitsProcessorList(),
    )
    # it would take the assistant's own, or transformers' default of 0.4; 0 drafts on regardless
    generator.generation_config.assistant_confidence_threshold = context.config.confidence_threshold or 0.0
    return generator
