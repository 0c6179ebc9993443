"""Compares a method's texts with those of plain `generate()`, by the one rule in `eval.equality`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from .conversation import Decoding
from .equality import first_difference
from .models import device_of
from .prompts import left_padded

REFERENCE, EQUAL, NEAR_TIE, FAULT = "reference", "equal", "near_tie", "fault"


@dataclass
class Text:
    """A prompt and what was generated for it."""

    prompt_ids: list[int]
    output_ids: list[int]


@dataclass
class Verdict:
    """
    Args:
        equality (`str`, *optional*):
            `"reference"`, `"equal"`, `"near_tie"` or `"fault"`; None if nothing can be compared.
        difference (`str`, *optional*): The first difference, in words.
    """

    equality: str | None
    difference: str | None = None


class Referee:
    """
    Args:
        model (`PreTrainedModel`): The target, in its plain state.
        pad_token_id (`int`): For prompts of different lengths.
        decoding ([`Decoding`]): How the texts were generated.
    """

    def __init__(self, model: PreTrainedModel, pad_token_id: int, decoding: Decoding):
        self.model = model
        self.pad_token_id = pad_token_id
        self.decoding = decoding

    def judge(self, plain: Sequence[Sequence[Text]], other: Sequence[Sequence[Text]]) -> list[list[Verdict]]:
        """
        Args:
            plain, other (`list[list[Text]]`): Every row's turns, by plain decoding and by another method.

        Returns:
            `list[list[Verdict]]`: One for every turn of every row.
        """
        verdicts: list[list[Verdict]] = [[] for _ in plain]
        for place in range(len(plain[0])):
            prompts = [turns[place].prompt_ids for turns in plain]
            for row, (expected, got) in enumerate(zip(plain, other, strict=True)):
                if expected[place].prompt_ids != got[place].prompt_ids:
                    before = verdicts[row][-1].equality if verdicts[row] else FAULT
                    verdicts[row].append(Verdict(before, "its prompt is another one: it holds an answer that differs"))
                else:
                    verdict = self._compare(prompts, row, expected[place].output_ids, got[place].output_ids)
                    verdicts[row].append(verdict)
        return verdicts

    def _compare(self, prompts: Sequence[list[int]], row: int, expected: list[int], got: list[int]) -> Verdict:
        step = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), None)
        scores: list[torch.Tensor] = []
        if step is not None:
            scores = self._scores(prompts, row, step)
            if int(scores[step].argmax()) != expected[step]:
                return Verdict(FAULT, f"new token {step}: plain decoding did not choose {expected[step]} again")
        difference = first_difference(expected, got, scores, self.model.dtype)
        if difference is None:
            return Verdict(EQUAL)
        return Verdict(NEAR_TIE if difference.is_near_tie else FAULT, str(difference))

    def _scores(self, prompts: Sequence[list[int]], row: int, step: int) -> list[torch.Tensor]:
        """Plain decoding's scores up to `step`, by generating again: keeping all would distort what is measured."""
        inputs = left_padded(prompts, self.pad_token_id, device_of(self.model))
        options = {"do_sample": self.decoding.do_sample, "return_dict_in_generate": True, "output_scores": True}
        with torch.no_grad():
            torch.manual_seed(self.decoding.seed)
            scores = self.model.generate(**inputs, max_new_tokens=step + 1, **options).scores
            if not self.decoding.do_sample:
                return [step_scores[row] for step_scores in scores]
            # Sampling takes an argmax too, of probabilities over noise that `torch.multinomial` draws: the same
            # near-tie rule then holds for the scores with that noise. Only the last step's is needed.
            torch.manual_seed(self.decoding.seed)
            if step:
                self.model.generate(**inputs, max_new_tokens=step, **options)
            noise = torch.empty_like(scores[step]).exponential_(1)
        return [step_scores[row] for step_scores in scores[:step]] + [
            (scores[step].log_softmax(dim=-1) - noise.log())[row]
        ]
