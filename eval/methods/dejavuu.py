"""The drafters of `dejavuu` 0.2.0 with its own engine, on our model object (a peer; `make eval-peers` installs it)."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eval.measure import Watched

from .base import Method, MethodResult


@dataclass
class Dejavuu(Method):
    """
    Args:
        drafter (`str`): One of `dejavuu.drafters.METHODS`.
        budget (`int`): Most tokens drafted in a round.
        tree (`bool`): Verify trees, of the width that dejavuu uses by default.
    """

    drafter: str
    budget: int
    tree: bool
    is_peer: ClassVar[bool] = True
    largest_batch: ClassVar[int | None] = 1
    samples: ClassVar[bool] = False

    def available(self) -> str | None:
        try:
            import dejavuu.core.engine  # noqa: F401
            import dejavuu.decoders.hf  # noqa: F401
        except ImportError as error:
            return f"{error}; `make eval-peers` installs the peers"
        return None

    def prepare(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, assistant: PreTrainedModel | None
    ) -> None:
        super().prepare(model, tokenizer, assistant)
        eos = model.generation_config.eos_token_id
        if isinstance(eos, list) and len(eos) > 1:
            raise ValueError(f"dejavuu stops at one EOS token, and this model has {len(eos)}")
        self._eos = eos[0] if isinstance(eos, list) else eos
        self._backend = _backend(model)

    def generate(
        self, inputs: dict[str, torch.Tensor], max_new_tokens: int, do_sample: bool, seed: int
    ) -> MethodResult:
        from dejavuu.core.engine import generate
        from dejavuu.drafters import make_drafter

        prompt = inputs["input_ids"]
        # a new drafter for every text, as `DejaVu.generate` makes one: it must not know the answer from a repeat
        result = generate(
            self._backend,
            prompt[0].tolist(),
            max_new_tokens,
            make_drafter(self.drafter),
            self.budget,
            self._eos,
            tree=self.tree,
        )
        return MethodResult(torch.cat([prompt, prompt.new_tensor([result.tokens])], dim=1))

    def drafting_calls(self) -> Watched:
        from dejavuu.drafters import make_drafter

        drafter = type(make_drafter(self.drafter))
        return [(drafter, name) for name in ("reset", "propose", "propose_tree")]


def _backend(model: PreTrainedModel) -> Any:
    """dejavuu's backend for transformers, around `model` instead of one that it loads itself."""
    from dejavuu.decoders.hf import HFBackend

    class Backend(HFBackend):
        def __post_init__(self) -> None:
            self._torch = torch
            self._model = model

        def rollback_kv(self, kv: Any, committed: int) -> Any:
            """The repair: recent releases of transformers take the number of tokens to drop, as a negative number."""
            kv.crop(committed - kv.get_seq_length())
            return kv

    # hidden states are for drafters that are not measured here
    return Backend(model_id="", device=str(model.device), emit_hidden=False)


METHODS = [
    Dejavuu("dejavuu_pld", drafter="pld", budget=8, tree=False),
    Dejavuu("dejavuu_suffix_decoding", drafter="suffix_decoding", budget=8, tree=False),
    Dejavuu("dejavuu_suffix_recycle_merge_tree", drafter="suffix_recycle_merge", budget=16, tree=True),
]
