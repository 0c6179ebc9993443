"""Prompt lookup of `economize` 0.3.2 with its own decoding loop (a peer; `make eval-peers` installs it)."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eval.measure import Calls, Watched

from .base import Method, MethodResult


@dataclass
class EconomizeLookup(Method):
    """
    Args:
        cycle_length (`int`): Tokens of a round: the drafted ones and one of the model.
    """

    name: str = "economize_lookup"
    cycle_length: int = 9
    is_peer: ClassVar[bool] = True
    samples: ClassVar[bool] = False

    def available(self) -> str | None:
        try:
            import economize.techniques.lookup  # noqa: F401
        except ImportError as error:
            return f"{error}; `make eval-peers` installs the peers"
        return None

    def prepare(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, assistant: PreTrainedModel | None
    ) -> None:
        super().prepare(model, tokenizer, assistant)
        import economize
        from economize.integrations import _generation_args
        from economize.techniques.lookup import LookupConfig

        # The repair: `generate()` also prepares an (empty) cache, which recent releases of transformers call so.
        _generation_args._PREPARED_MODEL_KWARGS |= {"cache"}
        decoding = economize.DecodeConfig(cycle_length=self.cycle_length)
        self._efficient: Any = economize.apply(model, LookupConfig(), decoding=decoding)

    def generate(
        self, inputs: dict[str, torch.Tensor], max_new_tokens: int, do_sample: bool, seed: int
    ) -> MethodResult:
        sequences = self._efficient.generate(
            inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=max_new_tokens,
            do_sample=False,
        )
        return MethodResult(sequences)

    def drafting_calls(self) -> Watched:
        from economize.techniques.lookup import LookupDrafter

        return [(LookupDrafter, "propose")]

    def calls(self) -> Calls:
        """Economize runs the model's layers itself, and the LM head after them."""
        from economize.runtime import LayerRunner

        return Calls(target=[(LayerRunner, "forward")], head=[(LayerRunner, "logits")], draft=self.drafting_calls())


METHODS = [EconomizeLookup()]
