"""Choosing the next token of a row from the target's logits, exactly as plain `generate()` does."""

from collections.abc import Sequence

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from .host import to_host
from .sequences import Sequences
from .token_tree import TokenTree

# Processors whose output depends on their arguments alone, by exact type: rows of different lengths may be processed
# by calling them once for each length. A subclass may keep state, and so may a user's function, so neither is here.
STATELESS_PROCESSORS = tuple(
    getattr(logits_process, name)
    for name in (
        "MinLengthLogitsProcessor MinNewTokensLengthLogitsProcessor TemperatureLogitsWarper "
        "RepetitionPenaltyLogitsProcessor EncoderRepetitionPenaltyLogitsProcessor TopPLogitsWarper TopKLogitsWarper "
        "TopHLogitsWarper MinPLogitsWarper TypicalLogitsWarper EpsilonLogitsWarper EtaLogitsWarper "
        "NoRepeatNGramLogitsProcessor EncoderNoRepeatNGramLogitsProcessor SequenceBiasLogitsProcessor "
        "NoBadWordsLogitsProcessor ForcedBOSTokenLogitsProcessor ForcedEOSTokenLogitsProcessor "
        "InfNanRemoveLogitsProcessor ExponentialDecayLengthPenalty LogitNormalization "
        "SuppressTokensAtBeginLogitsProcessor SuppressTokensLogitsProcessor WatermarkLogitsProcessor"
    ).split()
    if hasattr(logits_process, name)
)


# stateless processors that hold something for every row of the batch
WHOLE_BATCH_PROCESSORS = (
    logits_process.EncoderRepetitionPenaltyLogitsProcessor,
    logits_process.EncoderNoRepeatNGramLogitsProcessor,
)


def is_stateless(processor) -> bool:
    return type(processor) in STATELESS_PROCESSORS


def wants_whole_batch(processors: LogitsProcessorList) -> bool:
    """Whether rows cannot be processed apart from the others: something looks them up by their number."""
    for processor in processors:
        # of the repetition penalty: how long each row's prompt is
        holds_rows = isinstance(getattr(processor, "prompt_ignore_length", None), torch.Tensor)
        if holds_rows or type(processor) in WHOLE_BATCH_PROCESSORS or not is_stateless(processor):
            return True
    return False


class Selection:
    """
    Args:
        processors (`LogitsProcessorList`): Called once per committed token, in order.
        do_sample (`bool`): Draw from the processed scores (global random state), or take their argmax.
        sequences ([`Sequences`]): The tokens so far.
        together (`bool`): All rows stand at the same length: one call and one draw for the batch, as in plain decoding.
        rejection (`bool`): Accept drawn tokens by speculative sampling instead of by equality.
    """

    def __init__(
        self, processors: LogitsProcessorList, do_sample: bool, sequences: Sequences, together: bool, rejection: bool
    ):
        self.processors = processors
        self.do_sample = do_sample
        self.sequences = sequences
        self.together = together
        self.rejection = rejection and do_sample
        self._whole_batch = wants_whole_batch(processors)
        self.needs_scores = do_sample or len(processors) > 0

    def start_round(self, logits: torch.Tensor, trees: Sequence[TokenTree]) -> None:
        """
        Takes the target's answers of a round: `logits` of shape `(batch_size, width, vocab_size)`, float32. Plain
        greedy decoding needs nothing but their argmax, so that a round costs one host read.
        """
        self.logits = logits
        self.trees = trees
        self._answer_ids: torch.Tensor | None = None
        self._answers: list[list[int]] | None = None

    def end_round(self) -> None:
        """Lets go of the logits, so that they are gone when the next ones are made."""
        self.logits = self.logits.new_empty(0)

    @property
    def answer_ids(self) -> torch.Tensor:
        """`torch.LongTensor` of shape `(batch_size, width)`: argmax of the raw logits after every slot."""
        if self._answer_ids is None:
            self._answer_ids = self.logits.argmax(dim=-1)
        return self._answer_ids

    @property
    def answers(self) -> list[list[int]]:
        """The same on the host."""
        if self._answers is None:
            self._answers = to_host(self.answer_ids)
        return self._answers

    def select(self, rows: Sequence[int], slots: Sequence[int]) -> list[int]:
        """
        The next token of each of `rows`, whose walks stand at `slots` (one a row of the batch).

        Returns:
            `list[int]`: One token for each of `rows`, in their order.
        """
        if not self.needs_scores:
            return [self.answers[row][slots[row]] for row in rows]
        places = torch.tensor(slots, device=self.logits.device)
        logits = self.logits[torch.arange(len(slots), device=places.device), places]  # [batch, vocab]
        if self.together:
            scores = self.processors(self.sequences.ids(self.sequences.length(rows[0])), logits)
            tokens = self._choose(scores, range(len(slots)), slots)
            return [tokens[row] for row in rows]
        return self._choose(self._process_by_length(rows, logits), rows, slots)

    def _process_by_length(self, rows: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """`(len(rows), vocab_size)`: rows of one length are processed together."""
        scores = torch.empty_like(logits)
        for length, own in sorted(self.sequences.by_length(rows).items()):
            ids = self.sequences.ids(length)
            if self._whole_batch:
                scores[own] = self.processors(ids, logits.clone())[own]
            else:
                scores[own] = self.processors(ids[own], logits[own])
        return scores[list(rows)]

    def _choose(self, scores: torch.Tensor, rows: Sequence[int], slots: Sequence[int]) -> list[int]:
        if not self.do_sample:
            return to_host(scores.argmax(dim=-1))
        probs = torch.nn.functional.softmax(scores, dim=-1)
        if self.rejection:
            return self._accept_or_resample(probs, rows, slots)
        return to_host(torch.multinomial(probs, num_samples=1).squeeze(1))

    def _accept_or_resample(self, probs: torch.Tensor, rows: Sequence[int], slots: Sequence[int]) -> list[int]:
        """Speculative sampling (https://huggingface.co/papers/2211.17192, algorithm 1), one position at a time."""
        draft_probs = torch.zeros_like(probs)  # nothing drafted here: the residual is p itself
        drafted = [-1] * len(rows)
        for place, row in enumerate(rows):
            tree, parent = self.trees[row], slots[row] - 1
            node = next((node for node, above in enumerate(tree.parents) if above == parent), None)
            if node is None:
                continue
            drafted[place] = tree.token_ids[node]
            if tree.draft_probs is None:
                draft_probs[place, drafted[place]] = 1.0  # chosen, not drawn: a point mass
            else:
                draft_probs[place] = tree.draft_probs[node].to(probs.device)
        tokens = torch.tensor(drafted, device=probs.device)
        at_token = tokens.clamp(min=0)[:, None]
        uniform = torch.rand(len(rows), device=probs.device, dtype=probs.dtype)
        ratio = (probs.gather(1, at_token) / draft_probs.gather(1, at_token)).squeeze(1)
        accepted = (tokens >= 0) & (uniform < ratio)
        residual = (probs - draft_probs).clamp(min=0)
        # p and q equal up to rounding leave nothing to resample from; the draw is then from p
        residual = torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, probs)
        resampled = torch.multinomial(residual, num_samples=1).squeeze(1)
        return to_host(torch.where(accepted, tokens, resampled))
