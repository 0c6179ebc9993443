"""Plain `generate()`: what everything else is compared with."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from .base import Method, MethodResult


@dataclass
class Plain(Method):
    """No speculation."""

    name: str = "plain"
    keeps_sample: ClassVar[bool] = True

    def generate(
        self, inputs: dict[str, torch.Tensor], max_new_tokens: int, do_sample: bool, seed: int
    ) -> MethodResult:
        torch.manual_seed(seed)
        return MethodResult(self.model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=do_sample))


METHODS = [Plain()]
