"""Whether speculation gives the text of plain `generate()` on this device, under the rule of `eval.equality`."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

import hf_specstate

from .bounded_checks import FaultError
from .equality import Difference, first_difference


@dataclass
class EqualityCase:
    """
    Args:
        name (`str`): What is shown.
        spec_config (`dict`): How to speculate.
        batched (`bool`): All prompts in one ragged batch instead of one after the other.
        options (`dict`): Further arguments of the speculative call.
        sampled (`bool`): The same seed must give the same sample. Judged in float32 only: no rule tells rounding from a
            fault where a draw decides.
    """

    name: str
    spec_config: dict[str, Any]
    batched: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    sampled: bool = False

    @property
    def needs_assistant(self) -> bool:
        return "assistant" in self.spec_config["drafters"]


ASSISTANT = {"drafters": ["assistant"]}
BOTH = {"drafters": ["prompt_lookup", "assistant"]}
CASES = [
    EqualityCase("chain", ASSISTANT | {"max_nodes": 6}),
    EqualityCase("tree", BOTH | {"max_nodes": 12, "tree_width": 3}),
    EqualityCase("ragged chain", ASSISTANT | {"max_nodes": 4}, batched=True),
    EqualityCase("ragged tree", BOTH | {"max_nodes": 15, "tree_width": 3}, batched=True),
    EqualityCase("same seed, tree", ASSISTANT | {"max_nodes": 8, "tree_width": 2}, sampled=True),
]
# one for each compiled width: the tokens of a forward are rounded up to 2, 4, 8 and 16
STATIC = {"cache_implementation": "static"}
STATIC_CASES = [
    EqualityCase(f"static, {nodes + 1} tokens", ASSISTANT | {"max_nodes": nodes}, options=STATIC)
    for nodes in (1, 3, 7, 15)
]


def compare(
    case: EqualityCase,
    model: PreTrainedModel,
    assistant: PreTrainedModel,
    inputs: Sequence[dict[str, torch.Tensor]],
    new_tokens: int,
) -> str:
    """
    Args:
        case ([`EqualityCase`]): What to compare.
        model (`PreTrainedModel`): The target; it is enabled.
        assistant (`PreTrainedModel`): For the cases that need one.
        inputs (`list[dict]`): Batches of prompts, `input_ids` and `attention_mask` of shape `(batch_size, length)`.
        new_tokens (`int`): How many to generate.

    Returns:
        `str`: What was seen.

    Raises:
        FaultError: a difference that rounding does not explain, or no drafts at all.
    """
    hf_specstate.enable(model)  # plain calls run the stock code all the same
    seen: Counter[str] = Counter()
    for batch in inputs:
        plain_options = {"max_new_tokens": new_tokens, "do_sample": case.sampled, "return_dict_in_generate": True}
        torch.manual_seed(0)
        plain = model.generate(**batch, **plain_options, output_scores=True)
        torch.manual_seed(0)
        ours = model.generate(
            **batch,
            **plain_options,
            **case.options,
            assistant_model=assistant if case.needs_assistant else None,
            spec_config=case.spec_config | {"schedule": "constant", "strict": True},
            return_spec_states=True,
        )
        for difference in differences(plain, ours.sequences, batch["input_ids"].shape[1], model.dtype):
            if difference is not None and not difference.is_near_tie:
                raise FaultError(str(difference))
            seen["near ties" if difference else "equal"] += 1
        seen["drafted"] += sum(sequence.num_drafted for sequence in ours.spec_states)
        seen["accepted"] += sum(sequence.num_accepted for sequence in ours.spec_states)
    if not seen["drafted"]:
        raise FaultError("nothing was drafted, so nothing was shown")
    texts = f"{seen['equal']} texts equal" + (f", {seen['near ties']} near ties" if seen["near ties"] else "")
    return f"{texts}; {seen['accepted']} of {seen['drafted']} drafted tokens accepted"


def differences(plain, sequences: torch.Tensor, prompt_length: int, dtype: torch.dtype) -> list[Difference | None]:
    """The first difference of every row from `plain`, a `generate()` output with scores."""
    rows = zip(plain.sequences[:, prompt_length:].tolist(), sequences[:, prompt_length:].tolist(), strict=True)
    return [
        first_difference(expected, got, [scores[row] for scores in plain.scores], dtype)
        for row, (expected, got) in enumerate(rows)
    ]
