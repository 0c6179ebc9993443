"""What a drafter is asked, what it answers and what it learns."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase

from ..host import to_host
from ..token_tree import TokenTree

if TYPE_CHECKING:
    from ..config import SpecStateConfig
    from ..draft_history import HistoryOfRows
    from ..scheduling.acceptance import Acceptance
    from ..sequences import Sequences


@dataclass
class DraftContext:
    """
    The generation that a drafter works for; handed to [`Drafter.start`] once.

    Args:
        model (`PreTrainedModel`): The target.
        sequences ([`Sequences`]): The rows' tokens, kept up to date.
        config ([`SpecStateConfig`]): The call's configuration.
        generation_config (`GenerationConfig`): As `generate()` prepared it.
        logits_processor (`LogitsProcessorList`): Those of the target's processors that keep no state.
        input_ids (`torch.LongTensor` of shape `(batch_size, prompt_length)`): The padded prompt.
        model_kwargs (`dict`): The target's model inputs before its prefill, without its cache.
        inputs_tensor (`torch.Tensor`, *optional*): What an encoder read.
        assistant_model (`PreTrainedModel`, *optional*): The user's assistant, or the target's first layers.
        tokenizer, assistant_tokenizer (`PreTrainedTokenizerBase`, *optional*):
            As passed to `generate()`; the second only if it differs from the first.
        draft_history ([`HistoryOfRows`], *optional*): What earlier calls left for the rows.
        acceptance ([`Acceptance`]): How drafts have fared in this call.
    """

    model: PreTrainedModel
    sequences: "Sequences"
    config: "SpecStateConfig"
    generation_config: GenerationConfig
    logits_processor: LogitsProcessorList
    input_ids: torch.Tensor
    model_kwargs: dict[str, Any]
    inputs_tensor: torch.Tensor | None = None
    assistant_model: PreTrainedModel | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    assistant_tokenizer: PreTrainedTokenizerBase | None = None
    draft_history: "HistoryOfRows | None" = None
    acceptance: "Acceptance" = field(kw_only=True)

    @property
    def vocab_size(self) -> int:
        return self.model.config.get_text_config(decoder=True).vocab_size

    def encoder_tokens(self, row: int) -> list[int]:
        """What the encoder read for `row`; empty for other models, and if it read no tokens."""
        inputs = self.inputs_tensor
        if not getattr(self.model.config, "is_encoder_decoder", False) or inputs is None:
            return []
        if inputs.is_floating_point() or inputs.dim() != 2:
            return []
        tokens = to_host(inputs[row // (self.sequences.batch_size // inputs.shape[0])])
        return self.draftable(tokens)

    def draftable(self, tokens: list[int]) -> list[int]:
        """Without placeholders (of images, of embeddings) that are no tokens of the target."""
        return [token for token in tokens if 0 <= token < self.vocab_size]


@dataclass
class DraftRequest:
    """
    What is wanted for one row: at most `max_nodes` nodes, no deeper than `max_depth`, at most `width` children of a
    node (1: a chain). `token_ids` are the row's tokens so far, prompt first, without padding; read them only. `known`
    is what drafters before this one have proposed for the row, if the drafter `extends` it. One more step of a model,
    for all rows that it runs for, must be expected to give at least `least_gain` tokens, which all rows must have in
    common if they go `together`.
    """

    row: int
    token_ids: list[int]
    max_nodes: int
    max_depth: int
    width: int
    known: TokenTree = field(default_factory=TokenTree)
    least_gain: float = 0.0
    together: bool = False


@dataclass
class DraftOutcome:
    """
    How a row's draft fared.

    Args:
        row (`int`): The row.
        tree ([`TokenTree`]): What was verified.
        accepted (`list[int]`): The nodes whose tokens were committed, from the root down.
        token_ids (`list[int]`):
            The tokens committed in this round: the accepted ones and the one that the target added after them. (It adds
            none if it stopped at a drafted one, at the end of a text or of what rows in lockstep have in common.)
        answers (`list[int]` of length `1 + nodes`):
            The target's raw choice (argmax of its unprocessed logits) after the root and after every node. Empty unless
            a drafter sets `wants_answers`.
        logits (`torch.FloatTensor` of shape `(1 + nodes, vocab_size)`, *optional*):
            The unprocessed logits themselves, on the target's device; they are gone after [`Drafter.observe`]. None
            unless a drafter sets `wants_logits`.
    """

    row: int
    tree: TokenTree
    accepted: list[int]
    token_ids: list[int]
    answers: list[int] = field(default_factory=list)
    logits: torch.Tensor | None = None


@dataclass
class ModelRuns:
    """
    What running a model has cost a drafter in its last proposals.

    Args:
        begin_seconds (`float`): Of its first step, which catches up with the text; a first prefill is not counted.
        step_seconds (`float`), num_steps (`int`): Of all further steps together, and how many they were.
        num_nodes (`int`): Of the largest draft.
        is_late (`bool`): There was more to catch up with than one round gives.
    """

    begin_seconds: float = 0.0
    step_seconds: float = 0.0
    num_steps: int = 0
    num_nodes: int = 0
    is_late: bool = False


class Drafter:
    """
    Base class of drafters. A drafter is a small dataclass with one method, [`~Drafter.propose`]; registering it in
    `hf_specstate.drafting.DRAFTERS` gives it a name. Each generation works on a shallow copy of its own: make what
    changes in [`~Drafter.start`], and it is private to the call. Random numbers come from a private generator, never
    the global one.
    """

    name: ClassVar[str]
    wants_answers = False  # fill `DraftOutcome.answers`, at the price of a host read when sampling
    wants_logits = False  # fill `DraftOutcome.logits`
    default_width: ClassVar[int | None] = None  # alternatives for a position unless the user says; None: no limit
    extends: ClassVar[bool] = False  # fill `DraftRequest.known`
    runs: ModelRuns | None = None  # kept up to date by drafters that run a model: they are worth scheduling
    stops: ClassVar[bool] = False  # heeds `DraftRequest.least_gain`

    def needs_lockstep(self, context: DraftContext) -> bool:
        """Whether rows must advance together for this drafter; asked before [`~Drafter.start`], may refuse the call."""
        return False

    def start(self, context: DraftContext) -> None:
        """Called once, before the first proposal."""

    def propose(self, request: DraftRequest) -> TokenTree:
        """Candidate continuations of one row; an empty tree when there is nothing to say."""
        raise NotImplementedError

    def propose_rows(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        """Proposals for several rows at once; override it where rows share a forward."""
        return [self.propose(request) for request in requests]

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        """Called after each round with what became of the proposals."""
