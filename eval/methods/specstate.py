"""This package, in the configurations that are compared."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

import hf_specstate
from eval.measure import Watched
from hf_specstate.candidate_generator import SpecStateCandidateGenerator
from hf_specstate.drafting import AssistantDrafter

from .base import Method, MethodResult

MIXTURE = ["history", "previous_drafts", "recycling"]  # the default without an assistant
# name -> spec_config; another drafter or schedule is another line
CONFIGS: dict[str, dict[str, Any]] = {
    # what a user gets: the default drafters and schedule
    "specstate": {},
    "specstate_usual_products": {"few_rows": False},
    "specstate_assistant": {"drafters": ["assistant"]},
    "specstate_prompt_lookup_chain": {"drafters": ["prompt_lookup"], "max_nodes": 8},
    "specstate_prompt_lookup_tree": {"drafters": ["prompt_lookup"], "max_nodes": 16, "tree_width": 2},
    "specstate_assistant_chain": {"drafters": ["assistant"], "max_nodes": 8},
    "specstate_assistant_tree": {"drafters": ["assistant"], "max_nodes": 16, "tree_width": 2},
    "specstate_assistant_unconditioned": {"drafters": [AssistantDrafter(conditioning=0.0)], "max_nodes": 8},
    "specstate_stock": {"drafters": ["stock"], "max_nodes": 10},
    # each source alone, all of them, and all but one
    "specstate_history": {"drafters": ["history"], "max_nodes": 15},
    "specstate_previous_drafts": {"drafters": ["previous_drafts"], "max_nodes": 15},
    "specstate_recycling": {"drafters": ["recycling"], "max_nodes": 15},
    "specstate_mixture": {"drafters": MIXTURE, "max_nodes": 15},
    **{
        f"specstate_without_{left_out}": {"drafters": [name for name in MIXTURE if name != left_out], "max_nodes": 15}
        for left_out in MIXTURE
    },
}


@dataclass
class SpecState(Method):
    """
    Args:
        spec_config (`dict`): As of `generate(spec_config=)`.
    """

    spec_config: dict[str, Any]
    keeps_sample: ClassVar[bool] = True

    @property
    def _uses_assistant(self) -> bool:
        drafters = self.spec_config.get("drafters", [])
        return any(getattr(drafter, "name", drafter) == "assistant" for drafter in drafters)

    def refusal(self, batch_size: int, do_sample: bool, has_assistant: bool) -> str | None:
        if self._uses_assistant and not has_assistant:
            return "it drafts with an assistant model, and the run has none (--assistant)"
        return super().refusal(batch_size, do_sample, has_assistant)

    def generate(
        self, inputs: dict[str, torch.Tensor], max_new_tokens: int, do_sample: bool, seed: int
    ) -> MethodResult:
        torch.manual_seed(seed)
        hf_specstate.enable(self.model)
        try:
            out = self.model.generate(
                **inputs,
                assistant_model=self.assistant if self._uses_assistant else None,
                # a drafter that raises must show as an error here, not as a slow method
                spec_config=self.spec_config | {"strict": True},
                return_spec_states=True,
                max_new_tokens=max_new_tokens,
                do_sample=do_sample,
            )
        finally:
            hf_specstate.disable(self.model)  # the other methods measure the stock code
        return MethodResult(out.sequences, out.spec_states)

    def drafting_calls(self) -> Watched:
        return [(SpecStateCandidateGenerator, "propose")]


SCHEDULED = ("specstate", "specstate_usual_products", "specstate_assistant")  # the others draft as much in every round
METHODS = [
    SpecState(name, config if name in SCHEDULED else {"schedule": "constant"} | config)
    for name, config in CONFIGS.items()
]
