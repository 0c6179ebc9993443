"""
Recording the rounds of a generation as [`SpecStates`].

What the host knows anyway is written down at once; what lies on the device stays there, a few numbers a node, and is
fetched when the generation ends, or after each round if somebody streams them. Until then a round takes, on the
device, 12 bytes a slot (a token that the forward ran over) of every row, 12 `record_top_k` more at `"topk"`, and at
`"full"` the logits in the model's dtype and the last hidden state if there is one: `record_max_bytes` at most in all
rounds together.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers.utils import ModelOutput

from .clock import Clock
from .config import SpecStateConfig
from .host import from_host, to_host
from .selection import Selection
from .states import SpecRound, SpecSequence, SpecStates

logger = logging.getLogger(__name__)


class SpecStreamer(Protocol):
    """
    What `generate(spec_streamer=...)` takes, in the manner of `BaseStreamer`. `put_round` is called as each round ends,
    once for every row that took part, after the tokens of the round went to a `streamer`; `end` after the last one.
    (Whisper generates segment by segment, and calls `end` after each.) An exception that ends the generation in the
    middle of a round is preceded by what the round had committed.
    """

    def put_round(self, row: int, spec_round: SpecRound) -> None: ...

    def end(self) -> None: ...


@dataclass
class RoundOnDevice:
    """
    One forward of the target, for the rows that decoded in it.

    Args:
        rounds (`dict[int, SpecRound]`): By row; lacks what is below.
        marks (`tuple`): Points in time: begin, drafted, launched, verified, end.
        answer_ids (`torch.LongTensor` of shape `(batch_size, width)`): Argmax of the raw logits.
        logprobs (`torch.FloatTensor` of shape `(batch_size, max_nodes)`): Of the drafted tokens.
        top_logprobs, top_token_ids (`torch.Tensor` of shape `(batch_size, width, k)`, *optional*)
        logits (`torch.Tensor` of shape `(batch_size, width, vocab_size)`, *optional*)
        hidden_states (`torch.Tensor` of shape `(batch_size, width, hidden_size)`, *optional*)
    """

    rounds: dict[int, SpecRound]
    marks: tuple[Any, Any, Any, Any, Any]
    answer_ids: torch.Tensor
    logprobs: torch.Tensor
    top_logprobs: torch.Tensor | None = None
    top_token_ids: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    hidden_states: torch.Tensor | None = None


class Recorder:
    """
    Args:
        config ([`SpecStateConfig`]): For `record`, `record_top_k` and `record_max_bytes`.
        prompts (`list[list[int]]`): Of the rows, without padding.
        clock ([`Clock`]): That made the marks.
        keeps (`bool`): The states are wanted when the generation ends.
        spec_streamer ([`SpecStreamer`], *optional*): Gets every round as it ends.
    """

    def __init__(
        self,
        config: SpecStateConfig,
        prompts: Sequence[list[int]],
        clock: Clock,
        keeps: bool,
        spec_streamer: SpecStreamer | None,
    ):
        self._config = config
        self._clock = clock
        self._keeps = keeps
        self._spec_streamer = spec_streamer
        self._states = SpecStates([SpecSequence(prompt) for prompt in prompts])
        self._pending: list[RoundOnDevice] = []
        self._bytes = 0

    def add(
        self,
        rounds: dict[int, SpecRound],
        marks: tuple[Any, Any, Any, Any, Any],
        selection: Selection,
        outputs: ModelOutput,
    ) -> None:
        """
        Records one forward.

        Args:
            rounds (`dict[int, SpecRound]`): By row, as far as the host knows them.
            marks (`tuple`): Points in time: begin, drafted, launched, verified, end.
            selection ([`Selection`]): With the raw logits, in float32.
            outputs (`ModelOutput`): Of the forward; a prefill answers in its last place only.
        """
        width = selection.logits.shape[1]
        for spec_round in rounds.values():
            spec_round.num_rows, spec_round.width = len(rounds), width
        recorded = RoundOnDevice(rounds, marks, selection.answer_ids, _drafted_logprobs(selection.logits, rounds))
        if self._config.record != "ids":
            recorded.top_logprobs, recorded.top_token_ids = _top(selection.logits, self._config.record_top_k)
        if self._config.record == "full":
            self._add_full(recorded, outputs, width)
        if self._keeps:
            for row, spec_round in rounds.items():
                self._states[row].rounds.append(spec_round)
            self._pending.append(recorded)
        if self._spec_streamer is not None:
            self._fetch([recorded])
            self._pending.clear()
            for row, spec_round in rounds.items():
                self._spec_streamer.put_round(row, spec_round)

    def end(self) -> SpecStates | None:
        """The states, if they are wanted."""
        self._fetch(self._pending)
        self._pending.clear()
        if self._spec_streamer is not None:
            self._spec_streamer.end()
        return self._states if self._keeps else None

    def _add_full(self, recorded: RoundOnDevice, outputs: ModelOutput, width: int) -> None:
        """Logits and hidden states, while there is room for them."""
        wanted = {"logits": outputs.logits}
        layers = outputs.get("hidden_states") or outputs.get("decoder_hidden_states")
        if layers:
            wanted["hidden_states"] = layers[-1]
        slots = {name: tensor[:, -width:] for name, tensor in wanted.items()}
        size = sum(tensor.numel() * tensor.element_size() for tensor in slots.values())
        if self._bytes + size > self._config.record_max_bytes:
            if not self._states.num_left_out:
                logger.warning(
                    "`record_max_bytes=%d` is reached: further rounds are recorded without logits and hidden states.",
                    self._config.record_max_bytes,
                )
            self._states.num_left_out += 1
            return
        self._bytes += size
        for name, tensor in slots.items():
            # of a prefill's, only the last place; of a model that writes into its own buffers, what is there now
            setattr(recorded, name, tensor.clone())

    def _fetch(self, pending: Sequence[RoundOnDevice]) -> None:
        """Completes the rounds with what lies on the device: two reads for all of them, and one for each tensor."""
        if not pending:
            return
        answers = to_host(torch.cat([recorded.answer_ids.flatten() for recorded in pending]))
        logprobs = to_host(torch.cat([recorded.logprobs.flatten() for recorded in pending]))
        slot = node = 0
        for recorded in pending:
            width, max_nodes = recorded.answer_ids.shape[1], recorded.logprobs.shape[1]
            for row, spec_round in recorded.rounds.items():
                nodes = len(spec_round.token_ids)
                first_slot, first_node = slot + row * width, node + row * max_nodes
                spec_round.target_token_ids = answers[first_slot : first_slot + 1 + nodes]
                spec_round.target_logprobs = logprobs[first_node : first_node + nodes]
            slot, node = slot + recorded.answer_ids.numel(), node + recorded.logprobs.numel()
            self._fetch_seconds(recorded)
            _fetch_tensors(recorded)

    def _fetch_seconds(self, recorded: RoundOnDevice) -> None:
        began, drafted, launched, verified, ended = recorded.marks
        parts = ((began, drafted), (launched, verified), (verified, ended))
        draft, verify, other = (self._clock.seconds(start, end) for start, end in parts)
        for spec_round in recorded.rounds.values():
            spec_round.draft_seconds, spec_round.verify_seconds, spec_round.other_seconds = draft, verify, other


def _fetch_tensors(recorded: RoundOnDevice) -> None:
    for name in ("top_token_ids", "top_logprobs", "logits", "hidden_states"):
        tensor = getattr(recorded, name)
        if tensor is None:
            continue
        tensor = tensor.cpu()
        for row, spec_round in recorded.rounds.items():
            setattr(spec_round, name, tensor[row, : 1 + len(spec_round.token_ids)].clone())
        setattr(recorded, name, None)


def _drafted_logprobs(logits: torch.Tensor, rounds: dict[int, SpecRound]) -> torch.Tensor:
    """`(batch_size, max_nodes)`: the raw log-probability of every drafted token after its parent; padded with any."""
    max_nodes = max(len(spec_round.token_ids) for spec_round in rounds.values())
    if not max_nodes:
        return logits.new_empty((logits.shape[0], 0))
    places = [[[0, 0]] * max_nodes for _ in range(logits.shape[0])]  # [batch, nodes, (parent's slot, token)]
    for row, spec_round in rounds.items():
        drafted = zip(spec_round.parents, spec_round.token_ids, strict=True)
        places[row] = [[parent + 1, token] for parent, token in drafted]
        places[row] += [[0, 0]] * (max_nodes - len(places[row]))
    slots, tokens = from_host(places, logits.device).unbind(-1)
    last_parent = max(slot for row in places for slot, _ in row)
    normaliser = logits[:, : 1 + last_parent].logsumexp(dim=-1)  # [batch, slots with children]
    rows = torch.arange(logits.shape[0], device=logits.device)[:, None]
    return logits[rows, slots, tokens] - normaliser[rows, slots]


def _top(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and ids of the likeliest tokens in every slot, `(batch_size, width, k)` each."""
    values, token_ids = logits.topk(min(top_k, logits.shape[-1]), dim=-1)
    return values - logits.logsumexp(dim=-1, keepdim=True), token_ids
