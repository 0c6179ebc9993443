"""One method in conversation: every turn of a batch of questions, measured."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specstate import SpecSequence

from .data import Question
from .measure import Cost, Meter
from .methods import Method, MethodResult
from .models import device_of
from .prompts import encode, left_padded, new_tokens


@dataclass
class Decoding:
    """How texts are generated; the same for all methods of a run."""

    max_new_tokens: int
    do_sample: bool
    seed: int


@dataclass
class Turn:
    """
    One answer.

    Args:
        prompt_ids, output_ids (`list[int]`): Without padding; the end of sequence is the output's last token.
        text (`str`): The output.
        cost ([`Cost`]): Of the whole batch.
        rows (`int`): Size of the batch.
        rounds ([`SpecSequence`], *optional*): What was drafted, where the method knows.
    """

    prompt_ids: list[int]
    output_ids: list[int]
    text: str
    cost: Cost
    rows: int
    rounds: SpecSequence | None


class Conversation:
    """
    Args:
        model (`PreTrainedModel`), tokenizer (`PreTrainedTokenizerBase`): The target's.
        decoding ([`Decoding`]): How to generate.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, decoding: Decoding):
        self.model = model
        self.tokenizer = tokenizer
        self.decoding = decoding
        eos = model.generation_config.eos_token_id
        self._eos_token_ids = set(eos if isinstance(eos, list) else [eos])

    def hold(self, method: Method, questions: Sequence[Question]) -> list[list[Turn]]:
        """
        Every turn's prompt holds the method's own earlier answers.

        Returns:
            `list[list[Turn]]`: The turns of every question.

        Raises:
            ValueError: a prompt that leaves no room for the answer in the model's context.
        """
        messages: list[list[dict[str, str]]] = [[] for _ in questions]
        answers: list[list[Turn]] = [[] for _ in questions]
        for place in range(len(questions[0].turns)):
            for row, question in enumerate(questions):
                messages[row].append({"role": "user", "content": question.turns[place]})
            prompts = [encode(self.tokenizer, row) for row in messages]
            for row, turn in enumerate(self.answer(method, prompts)):
                answers[row].append(turn)
                said = self.tokenizer.decode(turn.output_ids, skip_special_tokens=True)
                messages[row].append({"role": "assistant", "content": said})
        return answers

    def answer(self, method: Method, prompts: Sequence[list[int]]) -> list[Turn]:
        """One measured `generate` call for all prompts."""
        self._check_room(prompts)
        device = device_of(self.model)
        inputs = left_padded(prompts, self.tokenizer.pad_token_id, device)
        width = inputs["input_ids"].shape[1]
        meter = Meter(device, width)
        with torch.no_grad(), meter.watching(method.calls()):
            result = method.generate(inputs, self.decoding.max_new_tokens, self.decoding.do_sample, self.decoding.seed)
        return self._turns(prompts, result, width, meter.cost())

    def warm_up(self, method: Method, questions: Sequence[Question], max_new_tokens: int = 8) -> None:
        """A short unmeasured call, so that nobody pays for what happens once: threads, probes, kernels."""
        prompts = [encode(self.tokenizer, [{"role": "user", "content": question.turns[0]}]) for question in questions]
        inputs = left_padded(prompts, self.tokenizer.pad_token_id, device_of(self.model))
        with torch.no_grad():
            method.generate(inputs, max_new_tokens, self.decoding.do_sample, self.decoding.seed)

    def _turns(self, prompts: Sequence[list[int]], result: MethodResult, width: int, cost: Cost) -> list[Turn]:
        outputs = new_tokens(result.sequences, width, self._eos_token_ids)
        states = result.spec_states
        return [
            Turn(
                prompt,
                output,
                self.tokenizer.decode(output),
                cost,
                len(prompts),
                None if states is None else states[row],
            )
            for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
        ]

    def _check_room(self, prompts: Sequence[list[int]]) -> None:
        longest = max(len(prompt) for prompt in prompts)
        context = getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if context is not None and longest + self.decoding.max_new_tokens > context:
            raise ValueError(
                f"a prompt of {longest} tokens and {self.decoding.max_new_tokens} new ones exceed the model's context "
                f"of {context}"
            )
