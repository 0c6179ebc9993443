"""
Speculative decoding as the ordinary loop over a look-ahead cache of the target's answers.

Each round drafts a small token tree for every row, runs the target once over all trees, and then decodes as plain
`generate()` does: process the scores, select a token, check the stopping criteria. While the selected token is in the
tree, its scores are already there; when it is not, the next round begins. Whatever was drafted, the text is the one
that plain decoding gives.
"""

import time
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import BaseStreamer
from transformers.utils import ModelOutput

from .candidate_generator import SpecStateCandidateGenerator
from .clock import Clock
from .compat import CACHE_NAME
from .drafting import DraftOutcome
from .logits_processor import SpecStateLogitsProcessor
from .outputs import OutputCollector
from .recording import Recorder
from .row_cache import STATIC_WIDTHS, forward_width
from .scheduling import RoundTimes
from .selection import Selection
from .sequences import Sequences
from .states import SpecRound
from .stopping import StopCheck
from .streaming import StreamRelay
from .token_tree import TokenTree, TreeBatch
from .verification import CachedModel


class SpeculativeDecoding:
    """
    One generation. `together` rows advance by the same number of tokens (always so at batch size 1).

    Args:
        target ([`CachedModel`]): The model, before its prefill.
        candidates ([`SpecStateCandidateGenerator`]): Drafts.
        sequences ([`Sequences`]): The rows' tokens.
        logits_processor (`LogitsProcessorList`), stopping_criteria (`StoppingCriteriaList`),
        generation_config (`GenerationConfig`), streamer (`BaseStreamer`, *optional*), synced_gpus (`bool`):
            As `generate()` prepared them.
        together (`bool`): Rows advance together.
        rejection (`bool`): Accept by speculative sampling.
        clock ([`Clock`]): Times the rounds.
        recorder ([`Recorder`], *optional*): Where they are recorded.
    """

    def __init__(
        self,
        target: CachedModel,
        candidates: SpecStateCandidateGenerator,
        sequences: Sequences,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None,
        synced_gpus: bool,
        together: bool,
        rejection: bool,
        clock: Clock,
        recorder: Recorder | None,
    ):
        self.target = target
        self.candidates = candidates
        self.sequences = sequences
        self.generation_config = generation_config
        self.synced_gpus = synced_gpus
        self.together = together
        self.clock = clock
        self.recorder = recorder
        self.num_rounds = 0
        self.stop_reasons: list[str | None] = [None] * sequences.batch_size
        capture = SpecStateLogitsProcessor()
        self.collector = OutputCollector(
            generation_config, target.model.config.is_encoder_decoder, capture, sequences.batch_size, together
        )
        if self.collector.wants_scores:
            logits_processor = LogitsProcessorList([*logits_processor, capture])
        self.selection = Selection(logits_processor, generation_config.do_sample, sequences, together, rejection)
        self.stop_check = StopCheck(stopping_criteria, sequences)
        self.relay = StreamRelay(streamer, sequences)

    def run(self, input_ids: torch.Tensor) -> ModelOutput | torch.Tensor:
        """
        Args:
            input_ids (`torch.LongTensor` of shape `(batch_size, prompt_length)`): The prompt.

        Returns:
            What plain `generate()` returns, with `spec_states` if they are recorded.
        """
        model = self.target.model
        self.began = self.drafted = self.clock.mark()
        self.host_began = time.perf_counter()
        outputs = self.target.prefill(input_ids)
        try:
            self.first_round(outputs)
            del outputs  # without `logits_to_keep` it holds the logits of the whole prompt
            with model._optimize_model_for_decode():
                while model._has_unfinished_sequences(all(self.finished), self.synced_gpus, device=input_ids.device):
                    self.round()
                self.complete_cache()
        finally:
            # an interrupted batch goes back to the row that got least far, which is what a streamer has delivered
            running = [rows for rows, done in zip(self.target.rows.lengths, self.finished, strict=True) if not done]
            self.target.rows.finalize(min(running, default=None))
        self.candidates.schedule.close(model)
        self.relay.end()
        return self.result()

    def first_round(self, outputs: ModelOutput) -> None:
        """Round 0 takes the token that the prefill gives; there was nothing to draft or verify."""
        no_drafts = [TokenTree() for _ in self.finished]
        self.launched, self.verified = self.drafted, self.clock.mark()
        self.collector.prefill(outputs)
        try:
            self.walk(outputs, no_drafts)
        finally:
            outcomes = self.record(outputs, no_drafts)
        self.learn(outcomes)

    def round(self) -> None:
        """Draft, plan, verify, walk, keep, learn."""
        trees = self.draft()
        outputs = self.verify(self.plan(trees))
        try:
            self.walk(outputs, trees)
        finally:  # also when a streamer raised half-way: the cache then holds what was delivered, as in plain decoding
            self.keep(outputs)
            outcomes = self.record(outputs, trees)
        self.learn(outcomes)

    @property
    def finished(self) -> list[bool]:
        return [reason is not None for reason in self.stop_reasons]

    # ------------------------------------------------------------------ draft, plan

    def draft(self) -> list[TokenTree]:
        """A tree for every row; a rank whose rows have all ended keeps its peers company with empty ones."""
        unfinished = self.decoding_rows()
        room = self.target.rows.room
        return self.candidates.propose(unfinished, None if room is None else room - 1)

    def plan(self, trees: list[TokenTree]) -> TreeBatch:
        """One width for all rows, for which a static cache must have room: there, `trees` are shortened in place."""
        width = 1 + max(len(tree) for tree in trees)
        room = self.target.rows.room
        if room is not None:
            width = forward_width(width, fixed_slots=True)
            width = max(rounded for rounded in (1, *STATIC_WIDTHS, width) if rounded <= max(room, 1))
            trees[:] = [tree.cut(width - 1, width) for tree in trees]
        roots = [None if self.is_idle(row) else tokens[-1] for row, tokens in enumerate(self.sequences.tokens)]
        return TreeBatch.pack(roots, trees, self.sequences.pad_token_id, width, self.together)

    # ------------------------------------------------------------------ verify, walk

    def verify(self, batch: TreeBatch) -> ModelOutput:
        """One forward of the target over all trees."""
        self.drafted = self.clock.mark()
        began = time.perf_counter()
        self.target.prepare(batch)
        self.host_began += time.perf_counter() - began  # done once, and not what a round takes
        self.launched = self.clock.mark()
        outputs = self.target.forward(batch)
        self.verified = self.clock.mark()
        return outputs

    def answers(self, outputs: ModelOutput) -> torch.Tensor:
        """`(batch_size, width, vocab_size)`: the target's logits, in the precision that plain decoding uses."""
        width = self.target.rows.pending or 1  # a prefill answers for its last token only
        return outputs.logits[:, -width:].to(dtype=torch.float32, device=self.target.rows.index.device)

    def walk(self, outputs: ModelOutput, trees: list[TokenTree]) -> None:
        """Ordinary decoding down the trees, as far as the selected tokens are in them."""
        batch_size = len(trees)
        self.slots = [0] * batch_size  # where each row stands: 0 is its last committed token, 1 + i its node i
        self.paths: list[list[int]] = [[] for _ in trees]  # the slots at which it was given a token
        self.selected = [0] * batch_size  # how many of them it selected itself; padding after its end is not counted
        self.starts = [self.sequences.num_new(row) for row in range(batch_size)]
        self.had_finished = self.finished
        self.selection.start_round(self.answers(outputs), trees)
        walking = self.decoding_rows()
        while walking:
            tokens = self.selection.select(walking, self.slots)
            for row, token in zip(walking, tokens, strict=True):
                self.commit(row, token)
            self.collector.end_step()
            if self.together:
                self.pad_finished_rows(walking)
            ended = self.stop_check(walking, self.collector.step_scores)
            for row, reason in zip(walking, ended, strict=True):
                self.stop_reasons[row] = self.stop_reasons[row] or reason
            self.relay.advance(self.finished)
            walking = self.step_down(walking, trees)

    def commit(self, row: int, token: int) -> None:
        self.collector.commit(row, self.selection.logits[row, self.slots[row]], self.sequences.length(row))
        self.paths[row].append(self.slots[row])
        self.selected[row] += 1
        self.sequences.commit(row, token)

    def pad_finished_rows(self, walking: list[int]) -> None:
        """Rows that have ended keep pace with padding while rows advance together, as in plain decoding."""
        for row in range(len(self.finished)):
            if row not in walking:
                self.paths[row].append(self.slots[row])
                self.sequences.pad(row)

    def step_down(self, walking: list[int], trees: list[TokenTree]) -> list[int]:
        """Moves the rows to the nodes of the tokens that they were just given; the rows whose walk goes on."""
        unfinished = self.decoding_rows()
        going = [row for row in walking if row in unfinished]
        if self.together and len(going) < len(walking):
            return []  # a row has ended: its last token, then padding, must be what the next forward feeds it
        nodes = {row: trees[row].child(self.slots[row] - 1, self.sequences.tokens[row][-1]) for row in going}
        drafted = {row: node for row, node in nodes.items() if node is not None}
        if self.together and len(drafted) < len(unfinished):
            return []
        for row, slot in enumerate(self.slots):  # a row that has ended takes the next slot, which holds padding
            self.slots[row] = drafted[row] + 1 if row in drafted else min(slot + 1, self.selection.logits.shape[1] - 1)
        return list(drafted)

    def decoding_rows(self) -> list[int]:
        """The rows that select tokens. Without an EOS criterion plain decoding lets ended rows go on until all end."""
        if all(self.finished):
            return []
        if self.together and not self.stop_check.pads_finished_rows:
            return list(range(len(self.finished)))
        return [row for row, done in enumerate(self.finished) if not done]

    def is_idle(self, row: int) -> bool:
        """Whether a row has ended and its cache holds all its tokens: it only runs along."""
        return self.stop_reasons[row] is not None and not self.target.missing_tokens(row, self.sequences.num_new(row))

    def overtaken_rows(self) -> list[int]:
        """
        Rows that have ended before another one's last token. Plain decoding feeds them their own last token while the
        others go on, so their cache must hold it.
        """
        counts = [self.sequences.num_new(row) for row in range(len(self.finished))]
        rows = [row for row, done in enumerate(self.finished) if done and counts[row] < max(counts)]
        return [row for row in rows if not self.is_idle(row)]

    # ------------------------------------------------------------------ keep, learn

    def keep(self, outputs: ModelOutput) -> None:
        """Keeps the cache slots of the committed paths: one for each token committed in this round."""
        paths = [path[: self.sequences.num_new(row) - self.starts[row]] for row, path in enumerate(self.paths)]
        for row in self.overtaken_rows():
            paths[row] = paths[row] or [0]
        selected = [path[:count] for path, count in zip(paths, self.selected, strict=True)]  # without the padding
        self.collector.keep(outputs, selected, self.target.rows)
        self.target.rows.keep(paths)

    def complete_cache(self) -> None:
        """
        One more forward, if the cache goes to the user and lacks the last token of a row that was overtaken in the very
        last round. (Not under `synced_gpus`, where the other ranks would have to take part.)
        """
        cache = self.target.rows.cache
        is_kept = self.generation_config.return_dict_in_generate or getattr(cache, "_is_user_defined", False)
        if is_kept and not self.synced_gpus and self.overtaken_rows():
            no_drafts = [TokenTree() for _ in self.finished]
            self.target.forward(self.plan(no_drafts))
            self.target.rows.keep([[0] if row in self.overtaken_rows() else [] for row in range(len(no_drafts))])

    def record(self, outputs: ModelOutput, trees: list[TokenTree]) -> list[DraftOutcome]:
        """What became of the trees; recorded, if anybody asked for it."""
        outcomes = [self.outcome(row, tree) for row, tree in enumerate(trees) if self.selected[row]]
        self.ended = self.clock.mark()
        if self.recorder is not None and outcomes:
            rounds = {outcome.row: self.spec_round(outcome) for outcome in outcomes}
            self.recorder.add(
                rounds, (self.began, self.drafted, self.launched, self.verified, self.ended), self.selection, outputs
            )
        self.num_rounds += 1
        return outcomes

    def outcome(self, row: int, tree: TokenTree) -> DraftOutcome:
        count = self.selected[row]
        tokens = self.sequences.new_tokens(row, self.starts[row])[:count]
        accepted = [slot - 1 for slot in self.paths[row][1:count]]
        # the last token is the target's own, unless it was drafted too and the row went no further
        last = tree.child(accepted[-1] if accepted else -1, tokens[-1])
        accepted += [] if last is None else [last]
        answers = self.selection.answers[row][: 1 + len(tree)] if self.candidates.wants_answers else []
        logits = self.selection.logits[row, : 1 + len(tree)] if self.candidates.wants_logits else None
        return DraftOutcome(row, tree, accepted, tokens, answers, logits)

    def spec_round(self, outcome: DraftOutcome) -> SpecRound:
        row, tree = outcome.row, outcome.tree
        has_added = len(outcome.accepted) < len(outcome.token_ids)
        return SpecRound(
            index=self.num_rounds,
            start=self.starts[row],
            token_ids=tree.token_ids,
            parents=tree.parents,
            sources=tree.sources,
            draft_logprobs=tree.log_probs,
            accepted=outcome.accepted,
            added_token_id=outcome.token_ids[-1] if has_added else None,
            num_planned=self.candidates.planned.get(row, 0),
            **self.why(row),
            stop_reason=None if self.had_finished[row] else self.stop_reasons[row],
        )

    def why(self, row: int) -> dict[str, Any]:
        """What the schedule thought of this round."""
        choice = self.candidates.schedule.choice
        if choice is None or row not in choice.expected_tokens:
            return {}
        return {
            "decision": choice.why,
            "expected_tokens": choice.expected_tokens[row],
            "expected_seconds": choice.expected_seconds or None,
            "considered_nodes": choice.considered_nodes,
            "considered_tokens": choice.considered_tokens,
            "considered_cost": choice.considered_cost,
        }

    def learn(self, outcomes: list[DraftOutcome]) -> None:
        """Tells drafters and schedule how it went."""
        schedule = self.candidates.schedule
        if schedule.wants_times and self.num_rounds > 1:  # the prefill is none of its business
            schedule.observe_times(self.times())
        self.host_began = time.perf_counter()
        self.began = self.clock.mark()
        self.candidates.observe(outcomes)
        for outcome in outcomes:
            outcome.logits = None
        self.selection.end_round()

    def times(self) -> RoundTimes:
        """
        Of this round, without waiting for the device: the tokens that the target chose have been read, so its forward
        is done. Where the clock only knows when it was launched, that reading is what has waited for it.
        """
        is_exact = self.sequences.device.type in ("cpu", "cuda")
        forward = self.clock.seconds(self.launched, self.verified if is_exact else self.ended)
        other = time.perf_counter() - self.host_began - forward
        return RoundTimes(self.selection.logits.shape[1], forward, max(other, 0.0))

    def result(self) -> ModelOutput | torch.Tensor:
        """What `generate()` returns."""
        states = None if self.recorder is None else self.recorder.end()
        sequences = self.sequences.finished_ids()
        if not self.generation_config.return_dict_in_generate:
            return sequences
        fields: dict[str, Any] = {"sequences": sequences, CACHE_NAME: self.target.rows.cache}
        if self.target.model.config.is_encoder_decoder:
            encoded = self.target.kwargs["encoder_outputs"]
            if self.generation_config.output_attentions:
                fields["encoder_attentions"] = encoded.get("attentions")
            if self.generation_config.output_hidden_states:
                fields["encoder_hidden_states"] = encoded.get("hidden_states")
        return self.collector.build(fields, states)
