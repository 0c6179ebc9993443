"""What a method of generating text is asked."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eval.measure import Calls, Watched
from hf_specstate import SpecStates


@dataclass
class MethodResult:
    """
    Args:
        sequences (`torch.LongTensor` of shape `(batch_size, length)`): The padded prompts with what was generated.
        spec_states ([`SpecStates`], *optional*): What was drafted and accepted, where the method knows.
    """

    sequences: torch.Tensor
    spec_states: SpecStates | None = None


@dataclass
class Method:
    """
    A way of generating text, with its hyper-parameters. Adding one is one file and one line in `eval.methods`.

    Args:
        name (`str`): Unique; the report tells plain, stock and peers apart by how it begins.
    """

    name: str
    is_peer: ClassVar[bool] = False  # somebody else's: when it fails, that is reported but is no fault of the run
    needs_assistant: ClassVar[bool] = False
    largest_batch: ClassVar[int | None] = None
    keeps_sample: ClassVar[bool] = False  # the same seed gives the sample of plain `generate()`
    samples: ClassVar[bool] = True

    def available(self) -> str | None:
        """Why the method cannot run here at all; None if it can."""
        return None

    def prepare(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, assistant: PreTrainedModel | None
    ) -> None:
        """Called once, before anything is measured."""
        self.model, self.tokenizer, self.assistant = model, tokenizer, assistant

    def generate(
        self, inputs: dict[str, torch.Tensor], max_new_tokens: int, do_sample: bool, seed: int
    ) -> MethodResult:
        """
        Args:
            inputs (`dict`): `input_ids` and `attention_mask` of shape `(batch_size, prompt_length)`, left-padded.
            max_new_tokens (`int`): Where to stop at the latest.
            do_sample (`bool`): Sample, from the random state that `seed` gives, instead of decoding greedily.
            seed (`int`): For the random state.
        """
        raise NotImplementedError

    def drafting_calls(self) -> Watched:
        """The calls that make drafts."""
        return []

    def calls(self) -> Calls:
        """What [`Meter`] watches."""
        assistant: Watched = [(self.assistant, "forward")] if self.assistant is not None else []
        return Calls(target=[(self.model, "forward")], draft=self.drafting_calls(), assistant=assistant)

    def refusal(self, batch_size: int, do_sample: bool, has_assistant: bool) -> str | None:
        """Why the method cannot take part in a run of this kind; None if it can."""
        if self.needs_assistant and not has_assistant:
            return "it needs an assistant model, and the run has none (--assistant)"
        if self.largest_batch is not None and batch_size > self.largest_batch:
            return f"it takes at most {self.largest_batch} row(s) at a time, not {batch_size}"
        if do_sample and not self.samples:
            return "it samples with random numbers of its own, so nothing could be compared"
        return None
