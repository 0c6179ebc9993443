"""
The one rule by which two texts count as the same.

A forward over several tokens and a forward over one differ in the last bits, so two logits that lie closer together
than rounding may change places. A difference of texts is a *near tie* if the two tokens' scores, at the first place
where the texts differ, lie within the gap below; any other difference is a fault. Float32 texts of the embedded model
are expected to be equal outright.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# largest gap, as a fraction of the largest absolute score of the step: some hundred units in the last place
NEAR_TIE_GAP = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass
class Difference:
    """
    The first place where two texts differ.

    Args:
        step (`int`): Number of the new token.
        expected, got (`int`, *optional*): The two tokens; None where a text has ended.
        gap (`float`): Difference of their scores as a fraction of the step's largest absolute score; infinite where one
            of them cannot be compared.
        is_near_tie (`bool`): Rounding explains it.
    """

    step: int
    expected: int | None
    got: int | None
    gap: float
    is_near_tie: bool

    def __str__(self) -> str:
        verdict = "a near tie" if self.is_near_tie else "a fault"
        return (
            f"new token {self.step}: expected {self.expected}, got {self.got}, relative gap {self.gap:.1e}: {verdict}"
        )


def first_difference(
    expected: Sequence[int], got: Sequence[int], scores: Sequence[torch.Tensor], dtype: torch.dtype
) -> Difference | None:
    """
    Args:
        expected, got (`list[int]`): The new tokens of plain decoding and of the other method.
        scores (`list[torch.Tensor]` of `(vocab_size,)`): Plain decoding's processed scores, one a step.
        dtype (`torch.dtype`): Of the model.

    Returns:
        [`Difference`], or None if the texts are equal.
    """
    step = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), None)
    if step is None:
        if len(expected) == len(got):
            return None
        step = min(len(expected), len(got))
        either = [ids[step] if step < len(ids) else None for ids in (expected, got)]
        return Difference(step, either[0], either[1], float("inf"), False)
    row = scores[step].float()
    gap = float((row[expected[step]] - row[got[step]]).abs() / row[torch.isfinite(row)].abs().max())
    return Difference(step, expected[step], got[step], gap, gap <= NEAR_TIE_GAP.get(dtype, 0.0))
