"""The speculative states of a generation: what was drafted, what the target answered, what became of it."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from .draft_statistics import DraftStatistics
from .token_tree import depths_of, names_of

if TYPE_CHECKING:
    import os

    import datasets
    import pandas
    from matplotlib.figure import Figure
    from transformers import PreTrainedTokenizerBase

    from .dense import Proposals, Scores


@dataclass(eq=False)
class SpecRound:
    """
    One row's part in one forward of the target. The forward runs over the row's last committed token (*slot* 0) and the
    drafted nodes (node `i` in slot `1 + i`), and answers after each of them. "Raw" is what the model computed: no
    logits processor, no temperature, no random draw.

    Args:
        index (`int`): Number of the round in the generation. Round 0 is the prefill, which verifies nothing.
        start (`int`): Place of the round's first committed token among the row's new tokens.
        token_ids (`list[int]` of length `nodes`): The drafted tokens, as verified.
        parents (`list[int]` of length `nodes`): Index of each node's parent; -1 for the last token committed before.
        sources (`list[str]` of length `nodes`):
            Who proposed each node: a drafter, or one of its methods (see `docs/drafters.md`); several joined by `+`.
        draft_logprobs (`list[float]` of length `nodes`):
            Natural log of the probability that the drafter gave to the token at this place, under the very distribution
            that it drafted from (processors and conditioning included). NaN for point masses, such as looked-up tokens.
        accepted (`list[int]`):
            The nodes whose tokens were committed, from the root down. In a batch that advances in lockstep, and at the
            end of a text, the last of them may have been committed without its children being looked at.
        added_token_id (`int`, *optional*):
            The token that the target committed after them. None if it stopped at a drafted one.
        num_planned (`int`): Most nodes that the schedule allowed.
        decision (`str`, *optional*):
            Why the draft was as large as it was, if the schedule is `"goodput"`: `"best"`, `"off"`, `"explore"` (to
            find out what such a forward costs) or `"fixed"` (decided before drafting). See [`~SpecRound.explain`].
        expected_tokens (`float`, *optional*): How many tokens the schedule expected to commit, if it estimates that.
        expected_seconds (`float`, *optional*): What it expected of `verify_seconds`, once it had seen a round.
        considered_nodes (`int`, *optional*), considered_tokens, considered_cost (`float`, *optional*):
            Of the best draft that there was to choose, whether it was taken or not: its size (0: none was made), the
            tokens that it was expected to commit, and its round's time as a multiple of one without a draft.
        stop_reason (`str`, *optional*):
            Why the row ended with this round: `"eos"`, `"stop_string"`, `"criterion"` for any other stopping criterion
            (`max_time` included), or `"length"`; the first of them if several did. None if it went on. (Without an
            end-of-sequence token plain `generate()` lets rows go on until all have ended; so do these.)
        target_token_ids (`list[int]` of length `1 + nodes`): Argmax of the raw logits in every slot, visited or not.
        target_logprobs (`list[float]` of length `nodes`):
            Natural log of the raw probability that the target gave to each drafted token after its parent.
        top_token_ids (`torch.LongTensor` of shape `(1 + nodes, k)`, *optional*):
            At `record="topk"` and `"full"`: the `k` likeliest tokens in every slot, likeliest first.
        top_logprobs (`torch.FloatTensor` of shape `(1 + nodes, k)`, *optional*): Their raw log-probabilities.
        logits (`torch.Tensor` of shape `(1 + nodes, vocab_size)`, *optional*):
            At `record="full"`: the raw logits in every slot, in the model's dtype.
        hidden_states (`torch.Tensor` of shape `(1 + nodes, hidden_size)`, *optional*):
            At `record="full"` with `output_hidden_states=True`: the last layer's, in every slot.
        num_rows (`int`): Rows of the batch that the forward decoded for.
        width (`int`): Slots of each row in the forward, padding included; for the prefill 1.
        draft_seconds (`float`): From the end of the round before: learning from it, and drafting.
        verify_seconds (`float`): The target's forward; for round 0 the prefill.
        other_seconds (`float`): Choosing tokens, stopping criteria, keeping the cache.
    """

    index: int
    start: int
    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    draft_logprobs: list[float] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    added_token_id: int | None = None
    num_planned: int = 0
    decision: str | None = None
    expected_tokens: float | None = None
    expected_seconds: float | None = None
    considered_nodes: int | None = None
    considered_tokens: float | None = None
    considered_cost: float | None = None
    stop_reason: str | None = None
    target_token_ids: list[int] = field(default_factory=list)
    target_logprobs: list[float] = field(default_factory=list)
    top_token_ids: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    hidden_states: torch.Tensor | None = None
    num_rows: int = 1
    width: int = 1
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    other_seconds: float = 0.0

    @property
    def committed_token_ids(self) -> list[int]:
        """What the round gave to the row: the accepted tokens, and the added one if there is one."""
        added = [] if self.added_token_id is None else [self.added_token_id]
        return [self.token_ids[node] for node in self.accepted] + added

    @property
    def num_accepted(self) -> int:
        return len(self.accepted)

    @property
    def depths(self) -> list[int]:
        """Distance of each node from the last token committed before, 1 for the token right after it."""
        return depths_of(self.parents)

    def explain(self) -> str:
        """In one line, why the schedule drafted as much as it did, and what came of it."""
        result = f"{_count(len(self.committed_token_ids), 'token')} came of it"
        if self.index == 0:
            return f"prefill: {result}"
        nodes = _count(len(self.token_ids), "node")
        if self.decision is None:
            return f"{nodes} of at most {self.num_planned}: {result}"
        offer = f"{self.considered_tokens:.2f} expected tokens at {self.considered_cost:.2f}x cost"
        if self.decision == "off":
            return (
                f"off: {offer}" if self.considered_nodes else "off: no drafter was asked, or none had anything to say"
            )
        expected = f"{self.expected_tokens:.2f} expected tokens"
        if self.decision == "best":  # for the batch: what is considered is the average of its rows
            differs = f"{self.expected_tokens:.2f}" != f"{self.considered_tokens:.2f}"
            why = f"best: {offer}" + (f", {self.expected_tokens:.2f} in this row" if differs else "")
        else:
            why = {"explore": "to measure such a forward", "fixed": "fixed before drafting"}[self.decision]
            why += f": {expected}"
        took = f" in {1e3 * self.verify_seconds:.0f} ms" if self.verify_seconds else ""
        if self.expected_seconds is not None:
            took += f" ({1e3 * self.expected_seconds:.0f} ms expected)"
        return f"{nodes}, {why}; {result}{took}"

    @property
    def seconds(self) -> float:
        """All of the round, shared by the rows of its batch."""
        return self.draft_seconds + self.verify_seconds + self.other_seconds


@dataclass(eq=False)
class SpecSequence(DraftStatistics):
    """
    The rounds of one row, in order; iterable and indexable.

    Args:
        prompt_token_ids (`list[int]`): The row's prompt, without padding (for encoder-decoder models, the decoder's).
        rounds (`list[SpecRound]`): One for every target forward that the row took part in.
        text_pieces (`list[str]`, *optional*):
            The text of each new token, see [`SpecStates.decode`]; joined, they are the text.
    """

    prompt_token_ids: list[int] = field(default_factory=list)
    rounds: list[SpecRound] = field(default_factory=list)
    text_pieces: list[str] | None = None

    def _rounds(self) -> Iterable[SpecRound]:
        return self.rounds

    def __iter__(self) -> Iterator[SpecRound]:
        return iter(self.rounds)

    def __len__(self) -> int:
        return len(self.rounds)

    def __getitem__(self, index):
        return self.rounds[index]

    def __repr__(self) -> str:
        return (
            f"SpecSequence({self.num_tokens} tokens in {len(self)} rounds, {self.num_accepted} of {self.num_drafted} "
            f"drafted tokens accepted, stop_reason={self.stop_reason!r})"
        )

    def cpu(self) -> "SpecSequence":
        """Itself. Whisper moves whatever `generate()` returns for a row to the CPU."""
        return self

    @property
    def token_ids(self) -> list[int]:
        """The row's new tokens, without padding."""
        return list(chain.from_iterable(spec_round.committed_token_ids for spec_round in self.rounds))

    @property
    def stop_reason(self) -> str | None:
        """Why the row ended, see [`SpecRound`]; None if it was interrupted."""
        return next((spec_round.stop_reason for spec_round in self.rounds if spec_round.stop_reason), None)

    @property
    def seconds(self) -> float:
        """Time spent in the row's rounds, which it shares with the other rows of its batch."""
        return sum(spec_round.seconds for spec_round in self.rounds)

    @property
    def token_sources(self) -> list[str | None]:
        """For each new token: who drafted it, or None if the target added it."""
        sources: list[str | None] = []
        for spec_round in self.rounds:
            sources += [spec_round.sources[node] for node in spec_round.accepted]
            sources += [] if spec_round.added_token_id is None else [None]
        return sources

    def drafted_mask(self, source: str | None = None) -> list[bool]:
        """For each new token: did it come from a draft of `source` (of any source if absent)?"""
        return [known is not None and source in (None, *names_of(known)) for known in self.token_sources]


class SpecStates(DraftStatistics):
    """
    The speculative states of a `generate()` call: one [`SpecSequence`] a row, one [`SpecRound`] in it for every target
    forward that the row took part in. Iterable and indexable by row; `print` shows a table. (Deliberately not a tuple:
    pipelines stack those.)

    Args:
        sequences (`list[SpecSequence]`): One a row.
        num_left_out (`int`, *optional*, defaults to 0):
            Forwards that were recorded without logits and hidden states because `record_max_bytes` was reached.
        token_texts (`dict[int, str]`, *optional*): What tokens look like, see [`~SpecStates.decode`].
    """

    def __init__(
        self,
        sequences: Sequence[SpecSequence] = (),
        num_left_out: int = 0,
        token_texts: dict[int, str] | None = None,
    ):
        self.sequences = list(sequences)
        self.num_left_out = num_left_out
        self.token_texts = token_texts

    @classmethod
    def concatenate(cls, parts: "Sequence[SpecStates]") -> "SpecStates":
        """The rows of several states, in order. Rounds are shared with the parts, not copied."""
        texts = [part.token_texts for part in parts if len(part)]
        known = {token: text for some in texts if some for token, text in some.items()}
        return cls(
            [sequence for part in parts for sequence in part],
            sum(part.num_left_out for part in parts),
            known if texts and None not in texts else None,
        )

    def _rounds(self) -> Iterable[SpecRound]:
        return chain.from_iterable(self.sequences)

    def __iter__(self) -> Iterator[SpecSequence]:
        return iter(self.sequences)

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, row):
        return self.sequences[row]

    def __repr__(self) -> str:
        rounds = max((len(sequence) for sequence in self), default=0)
        left_out = f", logits of {self.num_left_out} forwards left out" if self.num_left_out else ""
        return (
            f"SpecStates({len(self)} sequences, up to {rounds} rounds, {self.num_accepted} of {self.num_drafted} "
            f"drafted tokens accepted{left_out})"
        )

    def __str__(self) -> str:
        from .reporting.table import as_table

        return as_table(self)

    # ------------------------------------------------------------------ views and exports

    @property
    def proposals(self) -> "Proposals":
        """What was drafted, as padded tensors."""
        from .dense import proposals

        return proposals(self)

    @property
    def scores(self) -> "Scores":
        """What the target answered, as padded tensors."""
        from .dense import scores

        return scores(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, numbers and strings, ready for `json.dumps(..., allow_nan=False)`: NaN and inf become None."""
        from .export import to_dict

        return to_dict(self)

    def to_dataset(self, by: str = "round") -> "datasets.Dataset":
        """
        A `datasets.Dataset` to train drafts from.

        Args:
            by (`str`, *optional*, defaults to `"round"`):
                `"round"`: one row for every round of every sequence, with the tokens before it as `context_token_ids`.
                `"sequence"`: one row a sequence, with its prompt, its tokens, and its rounds as a list.
        """
        from .export import to_dataset

        return to_dataset(self, by)

    def to_pandas(self) -> "pandas.DataFrame":
        """A `pandas.DataFrame` with one row for every round; its columns are the fields of [`SpecRound`]."""
        from .export import to_pandas

        return to_pandas(self)

    def save(self, path: "str | os.PathLike") -> None:
        """Writes one file in the safetensors format, with the rest as JSON in its header. See [`~SpecStates.load`]."""
        from .state_files import save

        save(self, path)

    @classmethod
    def load(cls, path: "str | os.PathLike") -> "SpecStates":
        """
        Reads what [`~SpecStates.save`] wrote, exactly.

        Raises:
            ValueError: the file is damaged, cut short, of a newer version, or none of ours; the message names it.
        """
        from .state_files import load

        return load(path)

    # ------------------------------------------------------------------ to look at

    def decode(self, tokenizer: "PreTrainedTokenizerBase") -> "SpecStates":
        """
        Fills in `token_texts` and every sequence's `text_pieces`, so that the states can be read without the tokenizer
        (also after saving and loading). In place; returns itself.
        """
        from .reporting.token_text import decode

        decode(self, tokenizer)
        return self

    def show(self, tokenizer: "PreTrainedTokenizerBase | None" = None) -> None:
        """Prints the texts to the terminal, coloured by where each token came from, with a legend and numbers."""
        from .reporting.terminal import show

        show(self if tokenizer is None else self.decode(tokenizer))

    def to_html(self, tokenizer: "PreTrainedTokenizerBase | None" = None) -> str:
        """One self-contained HTML page: the coloured texts, every round on hover, and charts."""
        from .reporting.html import to_html

        return to_html(self if tokenizer is None else self.decode(tokenizer))

    def _repr_html_(self) -> str:
        from .reporting.html import to_embedded_html

        return to_embedded_html(self)

    def plot(self) -> "dict[str, Figure]":
        """Matplotlib figures: `"acceptance_by_depth"`, `"acceptance_by_source"` and `"draft_size"` over the rounds."""
        from .reporting.plots import plot

        return plot(self)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
