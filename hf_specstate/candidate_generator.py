"""The candidate-generator half of the pair: it asks the drafters, merges what they say, and tells them how it went."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from transformers.generation.candidate_generator import CandidateGenerator

from .drafting import DraftContext, Drafter, DraftOutcome, DraftRequest
from .drafting.mixture import likeliest, merge, mix
from .scheduling import Schedule
from .token_tree import TokenTree

logger = logging.getLogger(__name__)


class SpecStateCandidateGenerator(CandidateGenerator):
    """
    Holds the drafters and the schedule of one generation. The package's own loop asks it for trees of all rows
    ([`~SpecStateCandidateGenerator.propose`]) and reports the outcome; transformers' `_assisted_decoding` can use it
    too, for chains at batch size 1, through the two methods of [`CandidateGenerator`].

    Args:
        context ([`DraftContext`]): The generation.
        drafters (`list[Drafter]`): Who proposes; started here.
        schedule ([`Schedule`]): How many nodes a row may have.
        width (`int`, *optional*): Most children of a node; each drafter's own default if absent.
    """

    requires_model_outputs = False

    def __init__(
        self,
        context: DraftContext,
        drafters: Sequence[Drafter],
        schedule: Schedule,
        width: int | None = None,
    ):
        self.context = context
        self.schedule = schedule
        self.width = width
        self.drafters: list[Drafter] = list(drafters)
        self.acceptance = context.acceptance
        self.planned: dict[int, int] = {}  # row -> most nodes that it was allowed in the last round
        self._merges = context.config.acceptance == "match"
        self._previous = DraftOutcome(0, TokenTree(), [], [])  # in the stock loop
        for drafter in drafters:
            self._guarded(drafter, drafter.start, context)

    @property
    def wants_answers(self) -> bool:
        """Whether a drafter learns from what the target answered at nodes that were not accepted."""
        return any(drafter.wants_answers for drafter in self.drafters)

    @property
    def wants_logits(self) -> bool:
        """Whether a drafter learns from the target's scores."""
        return any(drafter.wants_logits for drafter in self.drafters)

    # ------------------------------------------------------------------ for the package's loop

    def propose(self, rows: Sequence[int], room: int | None = None) -> list[TokenTree]:
        """
        One tree for every row of the batch, empty for rows that are not among `rows`.

        Args:
            rows (`list[int]`): The rows that go on.
            room (`int`, *optional*): Most nodes that the target's cache has slots for.
        """
        sequences, max_length = self.context.sequences, self.context.generation_config.max_length
        limits: dict[int, tuple[int, int]] = {}  # row -> most nodes, greatest depth
        for row in rows:
            max_nodes = self.schedule.max_nodes(row) if room is None else min(self.schedule.max_nodes(row), room)
            max_depth = max_length - sequences.length(row) - 1  # the target adds a token of its own
            if max_nodes > 0 and max_depth > 0:
                limits[row] = (max_nodes, max_depth)
        self.planned = {row: max_nodes for row, (max_nodes, _) in limits.items()}
        proposals: dict[int, list[TokenTree]] = {row: [] for row in limits}
        for drafter in list(self.drafters):
            # under "rejection" the first drafter that has something to say has the row for itself
            asked = [row for row in limits if self._merges or not proposals[row]]
            if asked:
                self._ask(drafter, rows, {row: limits[row] for row in asked}, proposals)
        trees = {}
        for row, limit in limits.items():
            if proposals[row]:
                merged = merge(proposals[row])
                self.acceptance.propose(row, merged)
                trees[row] = self._judged(row, merged, *limit)
        trees = self.schedule.choose(rows, trees)
        return [trees.get(row, TokenTree()) for row in range(sequences.batch_size)]

    def _ask(
        self,
        drafter: Drafter,
        rows: Sequence[int],
        limits: dict[int, tuple[int, int]],
        proposals: dict[int, list[TokenTree]],
    ) -> None:
        """
        Adds a drafter's proposals to those of the ones before it, as far as the schedule wants them.

        Args:
            drafter ([`Drafter`]): Who is asked.
            rows (`list[int]`): The rows that go on.
            limits (`dict`): Rows that want a draft -> most nodes, greatest depth.
            proposals (`dict`): Row -> what was proposed before.
        """
        known: dict[int, TokenTree] = {}
        if drafter.extends or drafter.runs is not None:
            known = {row: self._judged(row, merge(proposals[row]), *limits[row]) for row in limits if proposals[row]}
        ask = self.schedule.ask(drafter, rows, known)
        if not ask.max_nodes:
            return
        width = self.width or drafter.default_width
        requests = []
        for row, (max_nodes, max_depth) in limits.items():
            nodes, before = min(max_nodes, ask.max_nodes), known.get(row, TokenTree())
            tokens = self.context.sequences.tokens[row]
            limit = (ask.least_gain, ask.together)
            requests.append(DraftRequest(row, tokens, nodes, max_depth, width or nodes, before, *limit))
        began = time.perf_counter()
        found = self._guarded(drafter, self._proposals, drafter, requests)
        if found is None:
            return
        self.schedule.asked(drafter, time.perf_counter() - began)
        for request, tree in zip(requests, found, strict=True):
            proposals[request.row] += [tree] if len(tree) else []

    def _proposals(self, drafter: Drafter, requests: list[DraftRequest]) -> list[TokenTree]:
        """What a drafter proposes, made sure that they are trees of this vocabulary within their limits."""
        proposals = drafter.propose_rows(requests)
        if len(proposals) != len(requests):
            raise ValueError(f"{len(proposals)} proposals for {len(requests)} rows")
        for proposal in proposals:
            if not isinstance(proposal, TokenTree):
                raise TypeError(f"`propose` must return a TokenTree, got {type(proposal).__name__}")
            proposal.check(self.context.vocab_size)
        return [
            mix([proposal], request.max_nodes, request.max_depth, request.width)
            for request, proposal in zip(requests, proposals, strict=True)
        ]

    def _judged(self, row: int, merged: TokenTree, max_nodes: int, max_depth: int) -> TokenTree:
        """The likeliest nodes of what was proposed for a row, with the chances that they have by experience."""
        chances = self.acceptance.estimate(row, merged)
        return likeliest(replace(merged, confidences=chances), max_nodes, max_depth, self.width)

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        """Tells schedule and drafters what became of a round's drafts."""
        for outcome in outcomes:
            self.acceptance.observe(outcome.row, outcome.token_ids)
        self.schedule.observe(outcomes)
        for drafter in list(self.drafters):
            began = time.perf_counter()
            self._guarded(drafter, drafter.observe, outcomes)
            self.schedule.taught(drafter, time.perf_counter() - began)

    def _guarded(self, drafter: Drafter, call: Callable, *args):
        """A drafter that raises is dropped with one warning, as drafts are never needed; `strict` raises."""
        try:
            return call(*args)
        except Exception as error:
            if self.context.config.strict:
                raise
            logger.warning(
                "The drafter %r raised %s: %s. It is left out for the rest of this call.",
                getattr(drafter, "name", drafter),
                type(error).__name__,
                error,
            )
            self.drafters = [kept for kept in self.drafters if kept is not drafter]  # `==` compares their fields
            self.schedule.dropped(drafter)
            return None

    # ------------------------------------------------------------------ for the stock loop

    def get_candidates(self, input_ids: torch.Tensor, **kwargs) -> tuple[torch.Tensor, None]:
        """
        Args:
            input_ids (`torch.LongTensor` of shape `(1, sequence_length)`): The tokens so far.

        Returns:
            `torch.LongTensor` of shape `(1, candidate_length)`, the tokens with a draft behind them, and `None` for its
            logits: the loop then samples from the target and compares, which is exact for any draft.
        """
        if self.schedule.wants_times:
            raise ValueError(f"{type(self.schedule).__name__} needs this package's own loop: nothing is timed here.")
        sequences = self.context.sequences
        for token in input_ids[0, sequences.length(0) :].tolist():
            sequences.commit(0, token)
        tree = self.propose([0])[0]
        self._previous = DraftOutcome(0, tree, [], [])
        drafted = torch.tensor([tree.token_ids], dtype=torch.long, device=input_ids.device)
        return torch.cat([input_ids, drafted], dim=1), None

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int):
        """
        Args:
            input_ids (`torch.LongTensor` of shape `(1, sequence_length)`): With the tokens of this round.
            scores (`torch.FloatTensor` of shape `(1, candidate_length + 1, vocab_size)`): The target's answers.
            num_matches (`int`): How many drafted tokens were accepted.
        """
        sequences, outcome = self.context.sequences, self._previous
        outcome.token_ids = input_ids[0, sequences.length(0) :].tolist()
        for token in outcome.token_ids:
            sequences.commit(0, token)
        outcome.accepted = list(range(int(num_matches)))
        outcome.answers = scores[0].argmax(dim=-1).tolist()
        outcome.logits = scores[0] if self.wants_logits else None
        self.observe([outcome])
